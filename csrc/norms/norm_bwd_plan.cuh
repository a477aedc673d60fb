#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_bwd.cuh"
#include "norms/norm_bwd_loop.cuh"

// Which kernels a backward pass runs, and with how many CTAs.

namespace flash_attn_norm {

/// The kernel for dx and where the sums of dweight and dbias come from: from that kernel, or from
/// a second one; and whether a last stage adds them up.
struct BwdPlan {
    using Kernel = void (*)(NormBwdKernelParams);

    Kernel dx_kernel = nullptr;
    LaunchShape dx_shape;
    Kernel columns_kernel = nullptr;
    LaunchShape columns_shape;
    int64_t num_partials = 0;
    int64_t num_steps = 0;
    int64_t rows_per_partial = 0;
    int num_stages = 1;
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

/// CTAs of a persistent kernel: as many per multiprocessor as registers, threads and two stages of
/// shared memory each allow. False if not even one stage fits.
template <class Config>
bool size_persistent_kernel(const NormBwdParams& params, int cluster_size, BwdPlan& plan) {
    static std::atomic<int> ready[kMaxDevices];
    const DeviceLimits& device = current_device_limits();
    const int registers =
        prepare_kernel(reinterpret_cast<const void*>(&norm_bwd_kernel<Config>), device, ready);
    constexpr int kRegistersPerSm = 65536;
    constexpr int kStaticBytes = 2048;  // RowSumStorage and what the system takes of each CTA
    constexpr int kMaxStages = 3;
    const int threads = plan.dx_shape.threads();
    const int words = stage_words<Config>(params.dresidual_out != nullptr);
    int ctas_per_sm = std::min(kRegistersPerSm / ((registers + 7) / 8 * 8 * threads),
                               device.threads_per_sm / threads);
    ctas_per_sm = std::max(1, std::min(ctas_per_sm, 4));
    for (; ctas_per_sm > 0; --ctas_per_sm) {
        const int bytes =
            std::min(device.shared_bytes_per_sm / ctas_per_sm, device.shared_bytes_per_cta) -
            kStaticBytes;
        int stages = kMaxStages;
        while (stages > 0 && thread_words<Config>(words, stages) * 16 * threads > bytes) --stages;
        if (stages >= 2 || (stages == 1 && ctas_per_sm == 1)) {
            plan.num_stages = stages;
            plan.dx_shape.shared_bytes = thread_words<Config>(words, stages) * 16 * threads;
            break;
        }
    }
    if (ctas_per_sm == 0) return false;

    const int64_t rows_per_step = int64_t{plan.dx_shape.row_slots} * Config::kRows;
    plan.num_steps = (params.problem.rows.num_rows + rows_per_step - 1) / rows_per_step;
    const int64_t max_blocks = std::max(1, device.num_sms / cluster_size) * ctas_per_sm;
    // So few rows that one CTA and no last stage take less time than two launches.
    constexpr int64_t kStepsAlone = 4;
    const bool is_alone = wants_column_sums(params) && plan.num_steps <= kStepsAlone;
    plan.num_partials = is_alone ? 1 : std::min(plan.num_steps, max_blocks);
    plan.dx_shape.num_ctas = plan.num_partials * cluster_size;
    plan.needs_final = wants_column_sums(params) && plan.num_partials > 1;
    return true;
}

template <class Config>
bool plan_persistent_kernel(const NormBwdParams& params, int cluster_size, BwdPlan& plan) {
    constexpr int kThreads = 256;
    const int64_t packs = params.problem.hidden_size / Config::kPack;
    const int64_t packs_per_cta = (packs + cluster_size - 1) / cluster_size;
    plan.dx_kernel = &norm_bwd_kernel<Config>;
    plan.dx_shape.threads_per_row =
        threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
    plan.dx_shape.row_slots = row_slots_for(plan.dx_shape.threads_per_row, kThreads);
    plan.dx_shape.cluster_size = cluster_size;
    return size_persistent_kernel<Config>(params, cluster_size, plan);
}

template <DType kXDType, DType kSumDType, bool kLayerNorm, class Arch>
bool plan_persistent(const NormBwdParams& params, BwdPlan& plan) {
    if (!has_aligned_rows(params)) return false;
    using ShortRows = BwdConfig<kXDType, kSumDType, kLayerNorm, 1, 4, Arch>;
    using LongRows = BwdConfig<kXDType, kSumDType, kLayerNorm, 2, 1, Arch>;
    // LayerNorm and a float32 sum beside a 16-bit x have no registers for more packs a thread.
    constexpr int kMostVecs = kLayerNorm || kSumDType != kXDType ? 2 : 4;
    using LongestRows = BwdConfig<kXDType, kSumDType, kLayerNorm, kMostVecs, 1, Arch>;
    constexpr int kMaxCluster = Arch::kHasClusters ? kMaxClusterSize : 1;
    const int64_t packs = params.problem.hidden_size / pack_size(kXDType);
    if (packs <= 32) return plan_persistent_kernel<ShortRows>(params, 1, plan);
    if (packs <= LongRows::kVecs * LongRows::kMaxThreads) {
        return plan_persistent_kernel<LongRows>(params, 1, plan);
    }
    constexpr int64_t kMostPacks = LongestRows::kVecs * LongestRows::kMaxThreads;
    for (int cluster_size = 1; cluster_size <= kMaxCluster; cluster_size *= 2) {
        if (packs <= cluster_size * kMostPacks) {
            return plan_persistent_kernel<LongestRows>(params, cluster_size, plan);
        }
    }
    return false;
}

template <DType kXDType, class Arch>
BwdPlan plan_loop(const NormBwdParams& params) {
    const NormProblem& problem = params.problem;
    constexpr int kPack = pack_size(kXDType);
    const bool is_aligned = has_aligned_rows(params);
    BwdPlan plan;
    plan.dx_kernel = is_aligned ? &norm_bwd_loop_kernel<kXDType, kPack, Arch>
                                : &norm_bwd_loop_kernel<kXDType, 1, Arch>;
    plan.dx_shape.threads_per_row =
        threads_for_row(problem.hidden_size, is_aligned ? 4 * kPack : 4, kLoopThreads);
    plan.dx_shape.row_slots = row_slots_for(plan.dx_shape.threads_per_row, 128);
    plan.dx_shape.num_ctas =
        (problem.rows.num_rows + plan.dx_shape.row_slots - 1) / plan.dx_shape.row_slots;
    if (!wants_column_sums(params)) return plan;

    constexpr int64_t kMinRowsPerPartial = 64;
    constexpr int64_t kCtasPerSm = 8;
    const int64_t num_tiles = (problem.hidden_size + kTileColumns - 1) / kTileColumns;
    const int64_t wanted = current_device_limits().num_sms * kCtasPerSm / num_tiles;
    const int64_t most = (problem.rows.num_rows + kMinRowsPerPartial - 1) / kMinRowsPerPartial;
    const int64_t partials = std::max<int64_t>(1, std::min(wanted, most));
    plan.rows_per_partial = (problem.rows.num_rows + partials - 1) / partials;
    plan.num_partials = (problem.rows.num_rows + plan.rows_per_partial - 1) / plan.rows_per_partial;
    plan.columns_kernel = &norm_bwd_columns_kernel<kXDType, Arch>;
    plan.columns_shape.threads_per_row = kTileColumns;
    plan.columns_shape.row_slots = kColumnGroups;
    plan.columns_shape.num_ctas = num_tiles * plan.num_partials;
    plan.needs_final = true;
    return plan;
}

template <DType kXDType, class Arch>
BwdPlan plan_norm_bwd_dtype(const NormBwdParams& params) {
    BwdPlan plan;
    const bool is_wide = params.problem.sum_dtype != kXDType;
    constexpr DType kWide = DType::kFloat32;
    const bool fits =
        params.problem.is_layer_norm
            ? (is_wide ? plan_persistent<kXDType, kWide, true, Arch>(params, plan)
                       : plan_persistent<kXDType, kXDType, true, Arch>(params, plan))
            : (is_wide ? plan_persistent<kXDType, kWide, false, Arch>(params, plan)
                       : plan_persistent<kXDType, kXDType, false, Arch>(params, plan));
    return fits ? plan : plan_loop<kXDType, Arch>(params);
}

template <class Arch>
BwdPlan plan_norm_bwd(const NormBwdParams& params) {
    if (params.problem.rows.num_rows == 0) {  // zero gradients
        BwdPlan plan;
        plan.needs_final = wants_column_sums(params);
        return plan;
    }
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            return plan_norm_bwd_dtype<DType::kFloat32, Arch>(params);
        case DType::kBFloat16:
            return plan_norm_bwd_dtype<DType::kBFloat16, Arch>(params);
        default:
            return plan_norm_bwd_dtype<DType::kFloat16, Arch>(params);
    }
}

template <class Arch>
int64_t norm_bwd_workspace(const NormBwdParams& params) {
    const BwdPlan plan = plan_norm_bwd<Arch>(params);
    const int num_sums = (params.dweight != nullptr) + (params.dbias != nullptr);
    if (!plan.needs_final) return 0;
    return num_sums * plan.num_partials * params.problem.hidden_size *
           static_cast<int64_t>(sizeof(float));
}

template <class Arch>
void launch_norm_bwd(const NormBwdParams& params, cudaStream_t stream) {
    const BwdPlan plan = plan_norm_bwd<Arch>(params);
    NormBwdKernelParams kernel_params;
    kernel_params.params = params;
    kernel_params.num_partials = plan.num_partials;
    kernel_params.num_steps = static_cast<int>(plan.num_steps);
    kernel_params.rows_per_partial = plan.rows_per_partial;
    kernel_params.num_stages = plan.num_stages;
    float* workspace = static_cast<float*>(params.workspace);
    kernel_params.dweight_partial = workspace;
    kernel_params.dbias_partial = params.dweight == nullptr
                                      ? workspace
                                      : workspace + plan.num_partials * params.problem.hidden_size;

    if (plan.dx_kernel != nullptr) {
        launch<Arch>(plan.dx_kernel, plan.dx_shape, kernel_params, "norm_bwd", stream);
    }
    if (plan.columns_kernel != nullptr) {
        launch<Arch>(plan.columns_kernel, plan.columns_shape, kernel_params, "norm_bwd_columns",
                     stream);
    }
    if (!plan.needs_final) return;
    LaunchShape shape;
    shape.threads_per_row = kTileColumns;
    shape.row_slots = kFinalGroups;
    const int num_sums = (params.dweight != nullptr) + (params.dbias != nullptr);
    shape.num_ctas = (params.problem.hidden_size + kTileColumns - 1) / kTileColumns * num_sums;
    launch<Arch>(&norm_bwd_final_kernel<Arch>, shape, kernel_params, "norm_bwd_final", stream);
}

}  // namespace flash_attn_norm
