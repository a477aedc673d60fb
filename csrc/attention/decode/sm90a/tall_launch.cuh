#pragma once

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/cache_map.h"
#include "attention/decode/sm90a/launch.h"
#include "attention/decode/sm90a/tall_kernel.cuh"
#include "common/dispatch.h"

namespace flash_attn_norm {
namespace decode {

/// Calls fn(config) with the kernel for this call.
template <int kHeadDim, class Fn>
void with_tall_config(const KvCacheAttentionParams& params, Fn&& fn) {
    dispatch_bool(packed_rows_per_sequence(params) > 64, [&](auto more_rows) {
        constexpr int kConsumers = decltype(more_rows)::value ? 2 : 1;
        if (params.cache.is_float8) {
            fn(TallConfig<Float16, kHeadDim, true, kConsumers>{});
        } else if (params.problem.dtype == DType::kBFloat16) {
            fn(TallConfig<BFloat16, kHeadDim, false, kConsumers>{});
        } else {
            fn(TallConfig<Float16, kHeadDim, false, kConsumers>{});
        }
    });
}

template <int kHeadDim>
SplitPlan plan_tall(const KvCacheAttentionParams& params) {
    SplitPlan plan;
    with_tall_config<kHeadDim>(params, [&](auto config) {
        using Config = decltype(config);
        SplitShape shape;
        shape.block_m = Config::kBlockM;
        shape.tile_keys = Config::kTileKeys;
        shape.sets = shape.more_sets = 1;
        shape.num_sms = attention_device_limits().num_sms;
        shape.ctas_per_sm = Config::kCtasPerSm;
        plan = plan_splits(params, shape);
    });
    return plan;
}

template <class Config>
void launch_tall_config(const KvCacheAttentionParams& params, const SplitPlan& plan,
                        const SplitParams& split_params, cudaStream_t stream) {
    BulkParams bulk;
    bulk.split = split_params;
    bulk.copy_rows = bulk_copy_rows(params.cache, Config::kTileKeys);
    bulk.map_k = cache_map(params, params.k_cache, params.cache.k_strides, params.problem.head_dim,
                           bulk.copy_rows, Config::Tile::kChunkColumns);
    bulk.map_v = cache_map(params, params.v_cache, params.cache.v_strides,
                           params.problem.head_dim_v, bulk.copy_rows, Config::Tile::kChunkColumns);
    static std::atomic<uint64_t> allowed{0};
    const DeviceLimits& device = attention_device_limits();
    allow_shared_memory(reinterpret_cast<const void*>(tall_split_kernel<Config>),
                        device.shared_per_block, device.device, allowed);
    const dim3 grid(grid_size("attention to a cache", plan.row_tiles * params.problem.num_heads_kv),
                    static_cast<unsigned>(plan.num_splits));
    launch_kernel<Sm90>(tall_split_kernel<Config>, grid, Config::kThreads,
                        TallSharedStorage<Config>::bytes(), bulk, "attention to a cache", stream);
}

template <int kHeadDim>
void launch_tall(const KvCacheAttentionParams& params, const SplitPlan& plan,
                 const SplitParams& split_params, cudaStream_t stream) {
    if (plan.row_tiles == 0) return;
    with_tall_config<kHeadDim>(params, [&](auto config) {
        launch_tall_config<decltype(config)>(params, plan, split_params, stream);
    });
}

}  // namespace decode
}  // namespace flash_attn_norm
