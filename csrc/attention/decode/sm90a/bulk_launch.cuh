#pragma once

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/bulk_kernel.cuh"
#include "attention/decode/sm90a/cache_map.h"
#include "attention/decode/sm90a/launch.h"

namespace flash_attn_norm {
namespace decode {

/// Calls fn(config) with the kernel for this call.
template <int kHeadDim, class Fn>
void with_bulk_config(const KvCacheAttentionParams& params, Fn&& fn) {
    if (params.cache.is_float8) {
        fn(BulkConfig<Float16, kHeadDim, true>{});
    } else if (params.problem.dtype == DType::kBFloat16) {
        fn(BulkConfig<BFloat16, kHeadDim, false>{});
    } else {
        fn(BulkConfig<Float16, kHeadDim, false>{});
    }
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
    BulkParams bulk;
    bulk.split = split_params;
    bulk.in_cluster = plan.in_cluster;
    bulk.copy_rows = bulk_copy_rows(params.cache, Config::kTileKeys);
    bulk.map_k = cache_map(params, params.k_cache, params.cache.k_strides, params.problem.head_dim,
                           bulk.copy_rows, Config::Tile::kChunkColumns);
    bulk.map_v = cache_map(params, params.v_cache, params.cache.v_strides,
                           params.problem.head_dim_v, bulk.copy_rows, Config::Tile::kChunkColumns);
    static std::atomic<uint64_t> allowed{0};
    const void* const kernel = reinterpret_cast<const void*>(bulk_split_kernel<Config>);
    const DeviceLimits& device = attention_device_limits();
    allow_shared_memory(kernel, device.shared_per_block, device.device, allowed);
    const dim3 grid(grid_size("attention to a cache", plan.row_tiles * params.problem.num_heads_kv),
                    static_cast<unsigned>(plan.num_splits));
    launch_kernel<Sm90>(bulk_split_kernel<Config>, grid, Config::threads(plan.sets),
                        BulkSharedStorage<Config>::bytes(plan.sets), bulk, "attention to a cache",
                        stream, plan.in_cluster ? plan.num_splits : 1);
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
