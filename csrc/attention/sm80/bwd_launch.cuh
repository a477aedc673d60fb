#pragma once

#include <cuda_runtime_api.h>

#include "attention/delta_correction.h"
#include "attention/sm80/bwd_kernel.cuh"
#include "attention/sm80/launch.h"
#include "common/check.h"
#include "common/dispatch.h"

namespace flash_attn_norm {
namespace sm80 {

template <class Config>
BwdPlan make_plan(const AttentionBwdParams& params, const DeviceLimits& device) {
    constexpr BwdTile tile = Config::kTile;
    BwdPlan plan;
    plan.block_m = Config::kBlockM;
    plan.block_n = Config::kBlockN;
    plan.dq = AccumulatorLayout{Config::kBlockM, Config::kHeadDim, Config::kThreads,
                                tile.warps_q_m,  Config::kTilesQM, Config::kTilesQD};
    plan.dk = AccumulatorLayout{Config::kBlockN, Config::kHeadDim,  Config::kThreads,
                                tile.warps_kv_n, Config::kTilesKvN, Config::kTilesKD};
    plan.dv = AccumulatorLayout{Config::kBlockN, Config::kHeadDimV, Config::kThreads,
                                tile.warps_kv_n, Config::kTilesKvN, Config::kTilesVD};
    const AttentionProblem& problem = params.problem;
    const int64_t ctas = BlockSlots::keys(problem, Config::kBlockN).count() * problem.num_heads_kv;
    const bool masked = problem.window_left >= 0 || problem.window_right >= 0;
    plan.head_splits =
        params.deterministic
            ? 1
            : head_splits(problem.group_size(), ctas, masked ? 2 * device.num_sms : device.num_sms);
    return plan;
}

template <class Config>
void launch_bwd_config(const AttentionBwdParams& params, const BwdPlan& plan,
                       const DeviceLimits& device, cudaStream_t stream) {
    using Shared = BwdSharedStorage<Config>;
    const AttentionProblem& problem = params.problem;
    BwdArgs args;
    args.params = params;
    args.workspace = plan.carve(params);
    args.head_splits = plan.head_splits;
    args.last_part = has_few_keys(problem) ? 1 : 0;
    int room = device.shared_per_block;
    if (Config::kGeneral && problem.attn_bias != nullptr) {
        const int bias_bytes =
            BwdBiasTile<Config>::bytes(problem.attn_bias_dtype == DType::kFloat32);
        if (Shared::bytes(1, 1) + bias_bytes <= room) args.bias_unit = bias_unit_bytes(problem);
        if (args.bias_unit > 0) room -= bias_bytes;
    }
    args.q_stages = Shared::bytes(2, 1) <= room ? 2 : 1;
    args.dout_stages = Shared::bytes(2, 2) <= room ? 2 : 1;
    const int64_t ctas = BlockSlots::keys(problem, Config::kBlockN).count() * problem.num_heads_kv *
                         plan.head_splits;
    if (ctas == 0) return;
    const int bytes =
        Shared::bytes(args.q_stages, args.dout_stages) + (device.shared_per_block - room);
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(bwd_kernel<Config>), device.shared_per_block,
                        device.device, allowed);
    bwd_kernel<Config>
        <<<grid_size("attention backward", ctas), Config::kThreads, bytes, stream>>>(args);
    check_launch("attention backward");
}

/// Calls fn(Config{}) for the kernel that this problem and device take.
template <int kHeadDim, int kHeadDimV, bool kSmall, class Fn>
void with_bwd_config(const AttentionProblem& problem, Fn&& fn) {
    dispatch_bool(needs_general_kernel(problem) || has_few_keys(problem), [&](auto general) {
        constexpr bool kGeneral = decltype(general)::value;
        if (problem.dtype == DType::kBFloat16) {
            fn(BwdConfig<BFloat16, kHeadDim, kHeadDimV, kGeneral, kSmall>{});
        } else {
            fn(BwdConfig<Float16, kHeadDim, kHeadDimV, kGeneral, kSmall>{});
        }
    });
}

template <int kHeadDim, int kHeadDimV, bool kSmall>
BwdPlan plan_bwd(const AttentionBwdParams& params, const DeviceLimits& device) {
    BwdPlan plan;
    with_bwd_config<kHeadDim, kHeadDimV, kSmall>(
        params.problem, [&](auto config) { plan = make_plan<decltype(config)>(params, device); });
    return plan;
}

template <int kHeadDim, int kHeadDimV, bool kSmall>
void launch_bwd(const AttentionBwdParams& params, const BwdPlan& plan, const DeviceLimits& device,
                cudaStream_t stream) {
    with_bwd_config<kHeadDim, kHeadDimV, kSmall>(params.problem, [&](auto config) {
        launch_bwd_config<decltype(config)>(params, plan, device, stream);
    });
}

}  // namespace sm80
}  // namespace flash_attn_norm
