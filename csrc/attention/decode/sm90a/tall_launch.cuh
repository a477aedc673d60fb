#pragma once

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/cache_launch.cuh"
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
        with_cache_types(params, [&](auto element, auto is_float8) {
            fn(TallConfig<decltype(element), kHeadDim, decltype(is_float8)::value, kConsumers>{});
        });
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
    static std::atomic<uint64_t> allowed{0};
    launch_splits<Sm90>(tall_split_kernel<Config>, params, plan, Config::kThreads,
                        TallSharedStorage<Config>::bytes(),
                        bulk_params<Config>(params, plan, split_params), allowed, stream);
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
