#pragma once

#include <cstdint>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_fwd.cuh"
#include "norms/norm_fwd_loop.cuh"

// Which kernel a forward pass runs, and with how many threads.

namespace flash_attn_norm {

template <class Config>
void launch_norm_fwd_config(const NormFwdParams& params, int cluster_size, cudaStream_t stream) {
    const int64_t packs = params.problem.hidden_size / Config::kPack;
    const int64_t packs_per_cta = (packs + cluster_size - 1) / cluster_size;
    LaunchShape shape;
    shape.threads_per_row = threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
    // Small CTAs, but two rows of some warps together.
    const bool is_pair = Config::kVecs == 2 ? shape.threads_per_row == 64
                                            : !Config::kLayerNorm && shape.threads_per_row == 128;
    shape.row_slots = cluster_size > 1 ? 1
                                       : row_slots_for(shape.threads_per_row,
                                                       is_pair ? 2 * shape.threads_per_row : 64);
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

/// Rows up to which the time of a single one counts.
constexpr int64_t kFewFwdRows = 128;

template <DType kXDType, DType kSumDType, bool kLayerNorm, class Arch>
void launch_norm_fwd_dtypes(const NormFwdParams& params, cudaStream_t stream) {
    using ShortRows = FwdConfig<kXDType, kSumDType, kLayerNorm, 2, Arch>;
    using Rows = FwdConfig<kXDType, kSumDType, kLayerNorm, 4, Arch>;
    if (!has_aligned_rows(params)) return launch_norm_fwd_loop<kXDType, 1, Arch>(params, stream);
    const int64_t packs = params.problem.hidden_size / pack_size(kXDType);
    const bool is_add = params.residual != nullptr;
    if constexpr (kSumDType == kXDType) {
        // Few packs a thread where there are few rows, and in RMSNorm where more than one tensor's
        // are in flight: no sum waits long, and weight and bias are there by then.
        const bool is_short =
            (is_add && !kLayerNorm) || params.problem.rows.num_rows <= kFewFwdRows;
        if (is_short && packs <= ShortRows::kVecs * ShortRows::kMaxThreads) {
            return launch_norm_fwd_config<ShortRows>(params, 1, stream);
        }
        // More packs a thread shorten the sums over a long row; LayerNorm waits for two.
        constexpr int64_t kMostPacks = kLayerNorm ? 256 : 1024;
        using LongRows = FwdConfig<kXDType, kSumDType, kLayerNorm, 8, Arch>;
        constexpr int64_t kMostLongPacks = LongRows::kVecs * LongRows::kMaxThreads;
        for (int cluster_size = 1; cluster_size <= Arch::kMaxClusterSize; cluster_size *= 2) {
            if (is_usual_problem(params) && packs > kMostPacks &&
                packs <= cluster_size * kMostLongPacks) {
                return launch_norm_fwd_config<LongRows>(params, cluster_size, stream);
            }
        }
    }
    for (int cluster_size = 1; cluster_size <= Arch::kMaxClusterSize; cluster_size *= 2) {
        if (packs <= cluster_size * Rows::kVecs * Rows::kMaxThreads) {
            return launch_norm_fwd_config<Rows>(params, cluster_size, stream);
        }
    }
    launch_norm_fwd_loop<kXDType, pack_size(kXDType), Arch>(params, stream);
}

template <DType kXDType, bool kLayerNorm, class Arch>
void launch_norm_fwd_norm(const NormFwdParams& params, cudaStream_t stream) {
    if (params.problem.sum_dtype == kXDType) {
        launch_norm_fwd_dtypes<kXDType, kXDType, kLayerNorm, Arch>(params, stream);
    } else {
        launch_norm_fwd_dtypes<kXDType, DType::kFloat32, kLayerNorm, Arch>(params, stream);
    }
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
