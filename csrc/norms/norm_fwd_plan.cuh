#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_fwd.cuh"
#include "norms/norm_fwd_cluster.cuh"
#include "norms/norm_fwd_loop.cuh"

// Which kernel a forward pass runs, and with how many threads.

namespace flash_attn_norm {

template <class Config>
void launch_norm_fwd_config(const NormFwdParams& params, int cluster_size, cudaStream_t stream) {
    const int64_t packs = params.problem.hidden_size / Config::kPack;
    const int64_t packs_per_cta = (packs + cluster_size - 1) / cluster_size;
    LaunchShape shape;
    shape.threads_per_row = threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
    // Small CTAs, but two rows of some warps together, and many of the shortest rows.
    const int row_threads = shape.threads_per_row;
    const bool is_pair =
        Config::kVecs == 2 ? row_threads == 64 : !Config::kLayerNorm && row_threads == 128;
    const int threads = is_pair                                  ? 2 * row_threads
                        : Config::kVecs == 2 && row_threads < 32 ? 128
                                                                 : 64;
    shape.row_slots = cluster_size > 1 ? 1 : row_slots_for(row_threads, threads);
    shape.cluster_size = cluster_size;
    shape.num_ctas =
        (params.problem.rows.num_rows + shape.row_slots - 1) / shape.row_slots * cluster_size;
    launch<typename Config::Arch>(&norm_fwd_kernel<Config>, shape, params, "norm_fwd", stream);
}

template <DType kXDType, int kWidth, class Arch>
void launch_norm_fwd_loop(const NormFwdParams& params, cudaStream_t stream) {
    LaunchShape shape;
    shape.threads_per_row = threads_for_row(params.problem.hidden_size, 4 * kWidth, 512);
    shape.row_slots = row_slots_for(shape.threads_per_row, 128);
    shape.num_ctas = (params.problem.rows.num_rows + shape.row_slots - 1) / shape.row_slots;
    launch<Arch>(&norm_fwd_loop_kernel<kXDType, kWidth, Arch>, shape, params, "norm_fwd_loop",
                 stream);
}

/// True if every row of every tensor starts at a multiple of 16 bytes and has whole packs.
inline bool has_aligned_rows(const NormFwdParams& params) {
    const NormProblem& problem = params.problem;
    return problem.hidden_size % pack_size(problem.x_dtype) == 0 &&
           is_aligned(params.x, problem.x_dtype, problem.rows, params.x_strides) &&
           is_aligned(params.residual, params.residual_dtype, problem.rows,
                      params.residual_strides) &&
           is_aligned(problem.weight) && is_aligned(params.bias) && is_aligned(params.out) &&
           is_aligned(params.residual_out);
}

/// As many clusters as run at a time. False if no cluster has room for a row, or not even two rows
/// fit in its memory.
template <DType kXDType, bool kLayerNorm, int kVecs, class Arch>
bool launch_norm_fwd_cluster(const NormFwdParams& params, cudaStream_t stream) {
    if constexpr (Arch::kHasClusters) {
        using Config = FwdClusterConfig<kXDType, kLayerNorm, kVecs, Arch>;
        static KernelLimits limits;
        const auto kernel = &norm_fwd_cluster_kernel<Config>;
        const void* function = reinterpret_cast<const void*>(kernel);
        const DeviceLimits& device = current_device_limits();
        const int64_t packs = params.problem.hidden_size / Config::kPack;
        const int64_t rows = params.problem.rows.num_rows;
        LaunchShape shape;
        while (packs > int64_t{shape.cluster_size} * Config::kVecs * Config::kMaxThreads) {
            shape.cluster_size *= 2;
        }
        if (shape.cluster_size > Arch::kMaxClusterSize || rows > kMaxWalkedRows) return false;
        const int64_t packs_per_cta = (packs + shape.cluster_size - 1) / shape.cluster_size;
        shape.threads_per_row = threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
        NormFwdClusterParams kernel_params;
        kernel_params.params = params;
        kernel_params.num_steps = static_cast<int>(rows);
        const int stage_bytes = kFwdStageWords<Config> * 16 * shape.threads_per_row;
        const int bytes =
            device.shared_per_block - static_cast<int>(sizeof(RowSumStorage<Arch>)) - 64;
        kernel_params.num_stages = std::min(kMaxStages, bytes / stage_bytes);
        if (kernel_params.num_stages < 2) return false;
        shape.shared_bytes = kernel_params.num_stages * stage_bytes;
        prepare_kernel(function, device, limits);
        const int64_t clusters = max_clusters(function, shape, device, limits);
        shape.num_ctas = std::min(rows, clusters) * shape.cluster_size;
        launch<Arch>(kernel, shape, kernel_params, "norm_fwd_cluster", stream);
        return true;
    }
    return false;
}

/// Rows up to which the time of a single one counts.
constexpr int64_t kFewFwdRows = 128;

/// A row whose threads have kVecs packs each, whatever else the kernel is chosen by: the order of
/// its sums, and with it every bit of the row, depends on that alone. False if the row is too long.
template <DType kXDType, bool kLayerNorm, int kVecs, class Arch>
bool launch_norm_fwd_vecs(const NormFwdParams& params, cudaStream_t stream) {
    using InRegisters = FwdConfig<kXDType, kLayerNorm, FwdKind::kUsual, kVecs, Arch>;
    using Twice = FwdTwiceConfig<kXDType, kLayerNorm, kVecs, Arch>;
    using Few = std::conditional_t<kLayerNorm && kVecs == 4,
                                   FwdFewConfig<kXDType, kLayerNorm, kVecs, Arch>, InRegisters>;
    using Short = std::conditional_t<kLayerNorm, FwdShortConfig<kXDType, kVecs, Arch>, Twice>;
    const int64_t packs = params.problem.hidden_size / InRegisters::kPack;
    if (packs > kVecs * InRegisters::kMaxThreads) return false;
    const int threads = threads_for_row(packs, kVecs, InRegisters::kMaxThreads);
    const bool is_even = packs == int64_t{kVecs} * threads;
    constexpr int64_t kShortRow = kLayerNorm ? 128 : 32;
    // A single row would wait for the second reading, and short rows gain nothing by it.
    if (params.problem.rows.num_rows <= kFewFwdRows) {
        launch_norm_fwd_config<Few>(params, 1, stream);
    } else if (params.residual != nullptr || (kLayerNorm ? !is_even : packs <= kShortRow)) {
        launch_norm_fwd_config<InRegisters>(params, 1, stream);
    } else if (packs <= kShortRow) {
        launch_norm_fwd_config<Short>(params, 1, stream);
    } else {
        launch_norm_fwd_config<Twice>(params, 1, stream);
    }
    return true;
}

/// False if the row is too long.
template <DType kXDType, bool kLayerNorm, class Arch>
bool launch_usual_norm_fwd(const NormFwdParams& params, cudaStream_t stream) {
    // Two packs a thread where sums take short: in RMSNorm, and in LayerNorm's shortest rows.
    constexpr int64_t kShortRow = kLayerNorm ? 32 : 1024;
    const int64_t packs = params.problem.hidden_size / pack_size(kXDType);
    if (packs <= kShortRow) {
        return launch_norm_fwd_vecs<kXDType, kLayerNorm, 2, Arch>(params, stream);
    }
    if (launch_norm_fwd_vecs<kXDType, kLayerNorm, 4, Arch>(params, stream)) return true;
    return params.residual == nullptr
               ? launch_norm_fwd_cluster<kXDType, kLayerNorm, 8, Arch>(params, stream)
               : launch_norm_fwd_cluster<kXDType, kLayerNorm, 4, Arch>(params, stream);
}

template <DType kXDType, bool kLayerNorm, class Arch>
void launch_norm_fwd_norm(const NormFwdParams& params, cudaStream_t stream) {
    if (!has_aligned_rows(params)) return launch_norm_fwd_loop<kXDType, 1, Arch>(params, stream);
    if (is_usual_problem(params) &&
        launch_usual_norm_fwd<kXDType, kLayerNorm, Arch>(params, stream)) {
        return;
    }
    using AnyRows = FwdConfig<kXDType, kLayerNorm, FwdKind::kAny, 4, Arch>;
    const int64_t packs = params.problem.hidden_size / AnyRows::kPack;
    for (int cluster_size = 1; cluster_size <= Arch::kMaxClusterSize; cluster_size *= 2) {
        if (packs > cluster_size * AnyRows::kVecs * AnyRows::kMaxThreads) continue;
        if (params.problem.sum_dtype == kXDType) {
            return launch_norm_fwd_config<AnyRows>(params, cluster_size, stream);
        }
        if constexpr (kXDType != DType::kFloat32) {
            using WideRows = FwdConfig<kXDType, kLayerNorm, FwdKind::kWideSum, 4, Arch>;
            return launch_norm_fwd_config<WideRows>(params, cluster_size, stream);
        }
    }
    launch_norm_fwd_loop<kXDType, pack_size(kXDType), Arch>(params, stream);
}

template <DType kXDType, class Arch>
void launch_norm_fwd_dtype(const NormFwdParams& params, cudaStream_t stream) {
    if (params.problem.is_layer_norm) {
        launch_norm_fwd_norm<kXDType, true, Arch>(params, stream);
    } else {
        launch_norm_fwd_norm<kXDType, false, Arch>(params, stream);
    }
}

template <class Arch>
void launch_norm_fwd(const NormFwdParams& params, cudaStream_t stream) {
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            return launch_norm_fwd_dtype<DType::kFloat32, Arch>(params, stream);
        case DType::kBFloat16:
            return launch_norm_fwd_dtype<DType::kBFloat16, Arch>(params, stream);
        case DType::kFloat16:
            return launch_norm_fwd_dtype<DType::kFloat16, Arch>(params, stream);
    }
}

}  // namespace flash_attn_norm
