#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_bwd.cuh"
#include "norms/norm_bwd_few.cuh"
#include "norms/norm_bwd_loop.cuh"
#include "norms/norms.h"

// Which kernels a backward pass runs, and with how many CTAs.

namespace flash_attn_norm {

/// The kernel for dx and the partial sums of dweight and dbias, and whether a last stage adds them
/// up.
struct BwdPlan {
    using Kernel = void (*)(NormBwdKernelParams);

    Kernel kernel = nullptr;
    LaunchShape shape;
    NormBwdKernelParams params;
    bool needs_final = false;
};

inline bool wants_column_sums(const NormBwdParams& params) {
    return params.dweight != nullptr || params.dbias != nullptr;
}

inline bool has_aligned_rows(const NormBwdParams& params) {
    const NormProblem& problem = params.problem;
    return problem.hidden_size % pack_size(problem.x_dtype) == 0 &&
           is_aligned(params.dout, problem.x_dtype, problem.rows, params.dout_strides) &&
           is_aligned(params.sum, problem.sum_dtype, problem.rows, params.sum_strides) &&
           is_aligned(params.dresidual_out, problem.sum_dtype, problem.rows,
                      params.dresidual_out_strides) &&
           is_aligned(problem.weight) && is_aligned(params.dx) && is_aligned(params.dresidual);
}

/// Fills in the CTAs of a persistent kernel, as many as fit at a time, and the steps in flight.
/// False if not even two steps fit.
template <class Config>
bool size_persistent_kernel(int cluster_size, BwdPlan& plan) {
    static KernelLimits limits;
    const DeviceLimits& device = current_device_limits();
    const int registers =
        prepare_kernel(reinterpret_cast<const void*>(plan.kernel), device, limits);
    constexpr int kRegistersPerSm = 65536;
    constexpr int kSystemBytes = 1024;  // of shared memory, that the system takes of each CTA
    constexpr int kStaticBytes = sizeof(RowSumStorage<typename Config::Arch>) + 64;
    const NormBwdParams& params = plan.params.params;
    const int threads = plan.shape.threads();
    const int step_words = stage_words<Config>(params.dresidual_out != nullptr);
    const auto shared_bytes = [&](int stages) {
        return (Config::kWeightWords + stages * step_words) * 16 * threads;
    };
    const int by_registers = kRegistersPerSm / ((registers + 7) / 8 * 8 * threads);
    const int by_threads = device.threads_per_sm / threads;
    int ctas_per_sm = std::clamp(std::min(by_registers, by_threads), 1, kMaxCtasPerSm);
    for (; ctas_per_sm > 0; --ctas_per_sm) {
        const int bytes =
            std::min(device.shared_per_sm / ctas_per_sm - kSystemBytes, device.shared_per_block) -
            kStaticBytes;
        int stages = kMaxStages;
        while (stages > 1 && shared_bytes(stages) > bytes) --stages;
        if (stages == 1) continue;
        plan.params.num_stages = stages;
        plan.shape.shared_bytes = shared_bytes(stages);
        break;
    }
    if (ctas_per_sm == 0) return false;

    int64_t blocks = int64_t{device.num_sms} * ctas_per_sm;
    if (cluster_size > 1) {
        blocks =
            max_clusters(reinterpret_cast<const void*>(plan.kernel), plan.shape, device, limits);
    }
    const int64_t rows = params.problem.rows.num_rows;
    const int64_t num_steps = (rows + plan.shape.row_slots - 1) / plan.shape.row_slots;
    plan.params.num_steps = static_cast<int>(num_steps);
    plan.params.num_partials = std::max<int64_t>(1, std::min(num_steps, blocks));
    plan.shape.num_ctas = plan.params.num_partials * cluster_size;
    plan.needs_final = wants_column_sums(params) && plan.params.num_partials > 1;
    return true;
}

template <class Config>
bool plan_persistent_kernel(int cluster_size, BwdPlan& plan) {
    constexpr int kThreads = 256;
    const int64_t packs = plan.params.params.problem.hidden_size / Config::kPack;
    const int64_t packs_per_cta = (packs + cluster_size - 1) / cluster_size;
    plan.kernel = &norm_bwd_kernel<Config>;
    plan.shape.threads_per_row = threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
    plan.shape.row_slots =
        cluster_size > 1 ? 1 : row_slots_for(plan.shape.threads_per_row, kThreads);
    plan.shape.cluster_size = cluster_size;
    return size_persistent_kernel<Config>(cluster_size, plan);
}

template <DType kXDType, DType kSumDType, bool kLayerNorm, class Arch>
bool plan_persistent(BwdPlan& plan) {
    using Rows = BwdConfig<kXDType, kSumDType, kLayerNorm, 16 / pack_size(kXDType), Arch>;
    const int64_t packs = plan.params.params.problem.hidden_size / Rows::kPack;
    constexpr int64_t kPacksPerCta = Rows::kVecs * Rows::kMaxThreads;
    // LayerNorm: two CTAs of half the size that share a multiprocessor take turns; one alone waits
    // for itself, in RMSNorm less than two clusters for each other.
    if (kLayerNorm && Arch::kMaxClusterSize > 1 && packs > kPacksPerCta / 2 &&
        packs <= kPacksPerCta) {
        return plan_persistent_kernel<Rows>(2, plan);
    }
    for (int cluster_size = 1; cluster_size <= Arch::kMaxClusterSize; cluster_size *= 2) {
        // More CTAs where one has no memory for two steps.
        if (packs <= cluster_size * kPacksPerCta &&
            plan_persistent_kernel<Rows>(cluster_size, plan)) {
            return true;
        }
    }
    return false;
}

/// Few rows: one launch, in which every column of dweight is summed up by one CTA.
constexpr int64_t kFewRows = 128;

template <DType kXDType, class Arch>
void plan_loop(bool is_aligned, BwdPlan& plan) {
    const NormBwdParams& params = plan.params.params;
    const NormProblem& problem = params.problem;
    constexpr int kPack = pack_size(kXDType);
    plan.shape = LaunchShape();  // nothing of a plan that did not fit
    plan.kernel = is_aligned ? &norm_bwd_loop_kernel<kXDType, kPack, Arch>
                             : &norm_bwd_loop_kernel<kXDType, 1, Arch>;
    constexpr int kColumnsPerThread = 4;  // as many for few rows: the order of sums depends on it
    plan.shape.threads_per_row = threads_for_row(
        problem.hidden_size, kColumnsPerThread * (is_aligned ? kPack : 1), kLoopThreads);
    plan.shape.row_slots = row_slots_for(plan.shape.threads_per_row, kLoopThreads);
    plan.params.num_dx_ctas =
        (problem.rows.num_rows + plan.shape.row_slots - 1) / plan.shape.row_slots;
    plan.shape.num_ctas = plan.params.num_dx_ctas;
    if (!wants_column_sums(params)) return;

    constexpr int64_t kMinRowsPerPartial = 64;
    constexpr int64_t kCtasPerSm = 8;
    const int64_t num_tiles = (problem.hidden_size + kTileColumns - 1) / kTileColumns;
    const int64_t wanted = current_device_limits().num_sms * kCtasPerSm / num_tiles;
    const int64_t most = (problem.rows.num_rows + kMinRowsPerPartial - 1) / kMinRowsPerPartial;
    const int64_t partials =
        problem.rows.num_rows <= kFewRows ? 1 : std::max<int64_t>(1, std::min(wanted, most));
    plan.params.rows_per_partial = (problem.rows.num_rows + partials - 1) / partials;
    plan.params.num_partials =
        (problem.rows.num_rows + plan.params.rows_per_partial - 1) / plan.params.rows_per_partial;
    plan.shape.num_ctas += num_tiles * plan.params.num_partials;
    plan.needs_final = plan.params.num_partials > 1;
}

/// From the plan of a persistent kernel to one launch in which as many threads have the same
/// columns of a row, so that its sums come together in the same order. A row that takes more
/// threads than a CTA has stays with the persistent kernel.
template <DType kXDType, DType kSumDType, class Arch>
void plan_few_rows(BwdPlan& plan) {
    using Config = FewRowsConfig<kXDType, kSumDType, Arch>;
    constexpr int kThreads = 256;
    const NormBwdParams& params = plan.params.params;
    const int64_t packs = params.problem.hidden_size / Config::kPack;
    const int num_rows = static_cast<int>(params.problem.rows.num_rows);
    const int num_parts = plan.shape.cluster_size;
    const int threads_per_row = num_parts * plan.shape.threads_per_row;
    if (num_parts > 2 || threads_per_row > Config::kMaxThreads) return;
    plan.kernel = &norm_bwd_few_kernel<Config>;
    plan.needs_final = false;
    plan.shape = LaunchShape();
    plan.shape.threads_per_row = threads_per_row;
    plan.shape.row_slots = row_slots_for(threads_per_row, kThreads);
    plan.params.num_partials = 0;
    plan.params.num_row_parts = num_parts;
    plan.params.num_dx_ctas = (num_rows + plan.shape.row_slots - 1) / plan.shape.row_slots;
    plan.shape.num_ctas = plan.params.num_dx_ctas;
    if (!wants_column_sums(params)) return;
    // One row's products are the sums already.
    const bool has_dtypes_of_x = params.problem.weight_dtype == kXDType &&
                                 (params.dbias == nullptr || params.dbias_dtype == kXDType);
    plan.params.is_only_row =
        num_rows == 1 && has_dtypes_of_x && is_aligned(params.dweight) && is_aligned(params.dbias);
    if (plan.params.is_only_row) return;
    // As many groups of rows as there are rows, but no CTA with less than 64 bytes of a row. At
    // first one thread for each column.
    constexpr int kMinLanes = 4;
    constexpr int kMaxGroups = ColumnSumStorage<Config>::kMaxGroups;
    const int threads = plan.shape.threads();
    int groups = Config::kPack;
    int lanes = threads / groups;
    while (lanes % 2 == 0 && lanes > kMinLanes && groups < std::min(num_rows, kMaxGroups)) {
        lanes /= 2;
        groups *= 2;
    }
    plan.params.column_lanes = lanes;
    plan.shape.num_ctas += (packs + lanes - 1) / lanes;
}

/// Aligned rows. False if they are too long, or too many.
template <DType kXDType, DType kSumDType, class Arch>
bool plan_aligned_rows(BwdPlan& plan) {
    const NormProblem& problem = plan.params.params.problem;
    if (problem.rows.num_rows > kMaxWalkedRows) return false;
    const bool fits = problem.is_layer_norm
                          ? plan_persistent<kXDType, kSumDType, true, Arch>(plan)
                          : plan_persistent<kXDType, kSumDType, false, Arch>(plan);
    if (fits && problem.rows.num_rows <= kFewRows) plan_few_rows<kXDType, kSumDType, Arch>(plan);
    return fits;
}

template <DType kXDType, class Arch>
void plan_norm_bwd_dtype(BwdPlan& plan) {
    const NormBwdParams& params = plan.params.params;
    const bool is_aligned = has_aligned_rows(params);
    const bool is_wide = params.problem.sum_dtype != kXDType;
    const bool fits =
        is_aligned && (is_wide ? plan_aligned_rows<kXDType, DType::kFloat32, Arch>(plan)
                               : plan_aligned_rows<kXDType, kXDType, Arch>(plan));
    if (!fits) plan_loop<kXDType, Arch>(is_aligned, plan);
}

template <class Arch>
BwdPlan plan_norm_bwd(const NormBwdParams& params) {
    BwdPlan plan;
    plan.params.params = params;
    if (params.problem.rows.num_rows == 0) {  // zero gradients
        plan.needs_final = wants_column_sums(params);
        return plan;
    }
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            plan_norm_bwd_dtype<DType::kFloat32, Arch>(plan);
            break;
        case DType::kBFloat16:
            plan_norm_bwd_dtype<DType::kBFloat16, Arch>(plan);
            break;
        case DType::kFloat16:
            plan_norm_bwd_dtype<DType::kFloat16, Arch>(plan);
            break;
    }
    return plan;
}

inline int64_t workspace_bytes(const BwdPlan& plan) {
    if (!plan.needs_final) return 0;
    const NormBwdParams& params = plan.params.params;
    const int num_sums = (params.dweight != nullptr) + (params.dbias != nullptr);
    return num_sums * plan.params.num_partials * params.problem.hidden_size *
           static_cast<int64_t>(sizeof(float));
}

/// The last stage of dweight and dbias. Narrow tiles where there are few columns, so that more
/// multiprocessors take part; where there are many, no more threads than run at a time, each with a
/// longer run of the partial sums.
inline LaunchShape final_shape(const NormBwdParams& params) {
    const int64_t hidden_size = params.problem.hidden_size;
    const DeviceLimits& device = current_device_limits();
    const int num_sums = (params.dweight != nullptr) + (params.dbias != nullptr);
    LaunchShape shape;
    shape.threads_per_row = hidden_size <= 2048 ? 8 : kTileColumns;
    shape.row_slots = kFinalThreads / shape.threads_per_row;
    const int64_t threads_at_once = int64_t{device.num_sms} * device.threads_per_sm;
    constexpr int kMinSlots = 4;
    while (shape.row_slots > kMinSlots &&
           hidden_size * num_sums * shape.row_slots > threads_at_once) {
        shape.row_slots /= 2;
    }
    const int64_t tiles = (hidden_size + shape.threads_per_row - 1) / shape.threads_per_row;
    shape.num_ctas = tiles * num_sums;
    return shape;
}

template <class Arch>
void launch_norm_bwd(const NormBwdParams& params, const Allocator& allocate, cudaStream_t stream) {
    BwdPlan plan = plan_norm_bwd<Arch>(params);
    float* workspace = static_cast<float*>(allocate(workspace_bytes(plan)));
    plan.params.dweight_partial = workspace;
    plan.params.dbias_partial =
        params.dweight == nullptr
            ? workspace
            : workspace + plan.params.num_partials * params.problem.hidden_size;
    if (plan.kernel != nullptr) {
        launch<Arch>(plan.kernel, plan.shape, plan.params, "norm_bwd", stream);
    }
    if (!plan.needs_final) return;
    // The same division into L1 and shared memory as before: changing it takes an idle
    // multiprocessor.
    static KernelLimits limits;
    prepare_kernel(reinterpret_cast<const void*>(&norm_bwd_final_kernel<Arch>),
                   current_device_limits(), limits);
    launch<Arch>(&norm_bwd_final_kernel<Arch>, final_shape(params), plan.params, "norm_bwd_final",
                 stream);
}

}  // namespace flash_attn_norm
