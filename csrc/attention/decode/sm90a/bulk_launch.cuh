#pragma once

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/bulk_kernel.cuh"
#include "attention/decode/sm90a/cache_launch.cuh"
#include "attention/decode/sm90a/launch.h"

namespace flash_attn_norm {
namespace decode {

/// Calls fn(config) with the kernel for this call.
template <int kHeadDim, class Fn>
void with_bulk_config(const KvCacheAttentionParams& params, Fn&& fn) {
    with_cache_types(params, [&](auto element, auto is_float8) {
        fn(BulkConfig<decltype(element), kHeadDim, decltype(is_float8)::value>{});
    });
}

template <class Config>
SplitShape bulk_shape() {
    const DeviceLimits& device = attention_device_limits();
    SplitShape shape;
    shape.block_m = Config::kBlockM;
    shape.tile_keys = Config::kSetKeys;
    shape.sets = Config::kSets;
    shape.more_sets = Config::kMaxSets;
    shape.num_sms = device.num_sms;
    shape.ctas_per_sm =
        device.shared_per_sm / (BulkSharedStorage<Config>::bytes(Config::kSets) + kReservedShared);
    shape.max_cluster = kMaxClusterSplits;
    return shape;
}

template <int kHeadDim>
SplitPlan plan_bulk(const KvCacheAttentionParams& params) {
    SplitPlan plan;
    with_bulk_config<kHeadDim>(
        params, [&](auto config) { plan = plan_splits(params, bulk_shape<decltype(config)>()); });
    return plan;
}

template <class Config>
void launch_bulk_config(const KvCacheAttentionParams& params, const SplitPlan& plan,
                        const SplitParams& split_params, cudaStream_t stream) {
    static std::atomic<uint64_t> allowed{0};
    launch_splits<Sm90>(bulk_split_kernel<Config>, params, plan, Config::threads(plan.sets),
                        BulkSharedStorage<Config>::bytes(plan.sets),
                        bulk_params<Config>(params, plan, split_params), allowed, stream);
}

template <int kHeadDim>
void launch_bulk(const KvCacheAttentionParams& params, const SplitPlan& plan,
                 const SplitParams& split_params, cudaStream_t stream) {
    if (plan.row_tiles == 0) return;
    with_bulk_config<kHeadDim>(params, [&](auto config) {
        launch_bulk_config<decltype(config)>(params, plan, split_params, stream);
    });
}

}  // namespace decode
}  // namespace flash_attn_norm
