#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "attention/sm90/bwd_arguments.cuh"
#include "attention/sm90/bwd_cluster_kernel.cuh"
#include "attention/sm90/bwd_launch.h"
#include "attention/sm90/dependent_launch.h"
#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {
namespace sm90 {

template <class Config>
BwdPlan make_plan(const AttentionBwdParams& params, int num_sms) {
    BwdPlan plan;
    plan.block_m = Config::kBlockM;
    plan.block_n = Config::kBlockN;
    plan.dq = Config::dq_layout();
    plan.dk = Config::key_gradient_layout(Config::kHeadDim);
    plan.dv = Config::key_gradient_layout(Config::kHeadDimV);
    plan.head_splits = bwd_head_splits(params, Config::kTileKeys, num_sms / 2);
    plan.dq_units = bwd_dq_units(params, plan.head_splits, Config::kTileKeys, num_sms / 2);
    plan.units_ahead = bwd_units_ahead(params, plan, Config::kTileKeys, num_sms / 2);
    return plan;
}

template <class Config>
void launch_bwd_config(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                       cudaStream_t stream) {
    constexpr int kBytes = sizeof(BwdClusterStorage<Config>);
    static_assert(kBytes <= 227 * 1024, "what a CTA may have");
    BwdArgs args;
    const int tiles = fill_bwd_args(params, plan, Config::kTileKeys, num_sms / 2, args);
    if (tiles == 0) return;
    map_operands<typename Config::QLayout, typename Config::DoutLayout, typename Config::KLayout,
                 typename Config::VLayout>(params, args);
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(reinterpret_cast<const void*>(bwd_cluster_kernel<Config>), kBytes,
                        current_device_limits().device, allowed);
    launch_dependent(bwd_cluster_kernel<Config>, 2 * tiles, Config::kThreads, kBytes, stream,
                     "attention backward", args);
}

template <int kHeadDimV>
BwdPlan plan_bwd_cluster(const AttentionBwdParams& params, int num_sms) {
    return make_plan<BwdClusterConfig<BFloat16, kHeadDimV, false>>(params, num_sms);
}

template <int kHeadDimV>
void launch_bwd_cluster(const AttentionBwdParams& params, const BwdPlan& plan, int num_sms,
                        cudaStream_t stream) {
    with_bwd_body(params.problem, [&](auto element, auto general) {
        using Element = decltype(element);
        constexpr bool kGeneral = decltype(general)::value;
        launch_bwd_config<BwdClusterConfig<Element, kHeadDimV, kGeneral>>(params, plan, num_sms,
                                                                          stream);
    });
}

}  // namespace sm90
}  // namespace flash_attn_norm
