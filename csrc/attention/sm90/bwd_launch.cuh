#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "attention/sm90/bwd_arguments.cuh"
#include "attention/sm90/bwd_kernel.cuh"
#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/dependent_launch.h"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {
namespace sm90 {

/// Calls fn(Config{}) with the kernel that this problem takes.
template <int kHeadDim, class Fn>
void with_bwd_config(const AttentionProblem& problem, Fn&& fn) {
    with_bwd_body(problem, [&](auto element, auto general) {
        using Element = decltype(element);
        constexpr bool kGeneral = decltype(general)::value;
        if constexpr (kHeadDim == 64) {
            fn(BwdConfig<Element, kHeadDim, kGeneral, BwdLoop::kManyTiles>{});
        } else if constexpr (kGeneral) {
            fn(BwdConfig<Element, kHeadDim, kGeneral, BwdLoop::kOneTile>{});
        } else if (bwd_tiles_are_short(problem)) {
            fn(BwdConfig<Element, kHeadDim, kGeneral, BwdLoop::kManyTiles>{});
        } else if (bwd_steps_are_wide(problem)) {
            fn(BwdConfig<Element, kHeadDim, kGeneral, BwdLoop::kWideSteps>{});
        } else {
            fn(BwdConfig<Element, kHeadDim, kGeneral, BwdLoop::kOneTile>{});
        }
    });
}

template <int kHeadDim>
BwdPlan plan_bwd_class(const AttentionBwdParams& params, int num_sms) {
    BwdPlan plan;
    with_bwd_config<kHeadDim>(params.problem, [&](auto config) {
        using Config = decltype(config);
        plan.block_m = Config::kBlockM;
        plan.block_n = Config::kBlockN;
        plan.dq = Config::dq_layout();
        plan.dk = plan.dv = Config::key_gradient_layout();
        plan.head_splits = bwd_head_splits(params, Config::kBlockN, num_sms);
        if (!Config::kPersists) {
            plan.dq_units = bwd_dq_units(params, plan.head_splits, Config::kBlockN, num_sms);
        }
        if (Config::kZeroesLater) {
            plan.units_ahead = bwd_units_ahead(params, plan, Config::kBlockN, num_sms);
        }
    });
    return plan;
}

template <class Config>
void launch_bwd_config(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                       cudaStream_t stream) {
    using QLayout = typename Config::QLayout;
    using KLayout = typename Config::KLayout;
    constexpr int kBytes = sizeof(BwdSharedStorage<Config>);
    static_assert(kBytes <= 227 * 1024, "what a CTA may have");
    BwdArgs args;
    const int tiles = fill_bwd_args(params, plan, Config::kBlockN, num_sms, args);
    if (tiles == 0) return;
    map_operands<QLayout, QLayout, KLayout, KLayout>(params, args);
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(bwd_kernel<Config>), kBytes,
                        current_device_limits().device, allowed);
    launch_dependent(bwd_kernel<Config>, Config::kPersists ? std::min(tiles, num_sms) : tiles,
                     Config::kThreads, kBytes, stream, "attention backward", args);
}

template <int kHeadDim>
void launch_bwd_class(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                      cudaStream_t stream) {
    with_bwd_config<kHeadDim>(params.problem, [&](auto config) {
        launch_bwd_config<decltype(config)>(params, plan, num_sms, stream);
    });
}

}  // namespace sm90
}  // namespace flash_attn_norm
