#pragma once

#include "attention/decode/launch.h"
#include "attention/decode/split_kernel.cuh"
#include "attention/sm80/launch.h"
#include "common/check.h"
#include "common/dispatch.h"

namespace flash_attn_norm {
namespace decode {

/// Calls fn(config) with the kernel for this call.
template <int kHeadDim, int kHeadDimV, class Fn>
void with_split_config(const AttentionProblem& problem, Fn&& fn) {
    dispatch_bool(packed_rows_per_sequence(problem) <= 16, [&](auto few_rows) {
        constexpr bool kFewRows = decltype(few_rows)::value;
        if (problem.dtype == DType::kBFloat16) {
            fn(SplitConfig<BFloat16, kHeadDim, kHeadDimV, kFewRows>{});
        } else {
            fn(SplitConfig<Float16, kHeadDim, kHeadDimV, kFewRows>{});
        }
    });
}

template <int kHeadDim, int kHeadDimV>
SplitPlan plan_split(const KvCacheAttentionParams& params) {
    SplitPlan plan;
    with_split_config<kHeadDim, kHeadDimV>(params.problem, [&](auto config) {
        using Config = decltype(config);
        int device = 0, shared_per_sm = 0;
        SplitShape shape;
        FAN_CUDA_CHECK(cudaGetDevice(&device));
        FAN_CUDA_CHECK(
            cudaDeviceGetAttribute(&shape.num_sms, cudaDevAttrMultiProcessorCount, device));
        FAN_CUDA_CHECK(cudaDeviceGetAttribute(&shared_per_sm,
                                              cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
        constexpr int kBytes =
            static_cast<int>(sizeof(SplitSharedStorage<Config>)) + sm80::kReservedShared;
        shape.block_m = Config::kBlockM;
        shape.keys_per_step = Config::kTileKeys * Config::kSets;
        shape.ctas_per_sm = std::max(1, std::min(shared_per_sm / kBytes, 512 / Config::kThreads));
        plan = plan_splits(params, shape);
    });
    return plan;
}

template <int kHeadDim, int kHeadDimV>
void launch_split(const KvCacheAttentionParams& params, const SplitPlan& plan,
                  cudaStream_t stream) {
    const int64_t ctas = plan.row_tiles * params.problem.num_heads_kv;
    if (ctas == 0) return;
    with_split_config<kHeadDim, kHeadDimV>(params.problem, [&](auto config) {
        using Config = decltype(config);
        constexpr int kBytes = static_cast<int>(sizeof(SplitSharedStorage<Config>));
        FAN_CUDA_CHECK(cudaFuncSetAttribute(split_kernel<Config>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
        split_kernel<Config>
            <<<dim3(sm80::grid_size(ctas), plan.num_splits), Config::kThreads, kBytes, stream>>>(
                params, plan);
        check_launch("attention to a cache");
    });
}

}  // namespace decode
}  // namespace flash_attn_norm
