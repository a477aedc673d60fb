#pragma once

#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/split_kernel.cuh"
#include "common/check.h"
#include "common/dispatch.h"

namespace flash_attn_norm {
namespace decode {

/// Calls fn(config) with the kernel for this call.
template <class Arch, int kHeadDim, int kHeadDimV, class Fn>
void with_split_config(const KvCacheAttentionParams& params, Fn&& fn) {
    const AttentionProblem& problem = params.problem;
    dispatch_bool(packed_rows_per_sequence(params) <= 16, [&](auto few_rows) {
        constexpr bool kFewRows = decltype(few_rows)::value;
        if constexpr (kHeadDim <= 256) {  // decode.cu refuses others
            if (params.cache.is_float8) {
                return fn(SplitConfig<Arch, Float16, kHeadDim, kHeadDimV, kFewRows, true>{});
            }
        }
        if (problem.dtype == DType::kBFloat16) {
            fn(SplitConfig<Arch, BFloat16, kHeadDim, kHeadDimV, kFewRows, false>{});
        } else {
            fn(SplitConfig<Arch, Float16, kHeadDim, kHeadDimV, kFewRows, false>{});
        }
    });
}

template <class Config>
SplitShape shape_of(const DeviceLimits& device) {
    using Storage = SplitSharedStorage<Config>;
    constexpr SplitTile kTile = Config::kTile;
    constexpr int kBytes = Storage::bytes(kTile.sets) + kReservedShared;
    constexpr int kRegisterLimit = 65536 / (256 * Config::threads(kTile.sets));
    SplitShape shape;
    shape.block_m = Config::kBlockM;
    shape.tile_keys = Config::kTileKeys;
    shape.sets = kTile.sets;
    shape.more_sets =
        Storage::bytes(kTile.more_sets) <= device.shared_per_block ? kTile.more_sets : kTile.sets;
    shape.num_sms = device.num_sms;
    shape.ctas_per_sm = std::max(1, std::min(device.shared_per_sm / kBytes, kRegisterLimit));
    return shape;
}

template <class Arch, int kHeadDim, int kHeadDimV>
SplitPlan plan_split(const KvCacheAttentionParams& params) {
    SplitPlan plan;
    with_split_config<Arch, kHeadDim, kHeadDimV>(params, [&](auto config) {
        using Config = decltype(config);
        plan = plan_splits(params, shape_of<Config>(attention_device_limits()));
    });
    return plan;
}

template <class Arch, int kHeadDim, int kHeadDimV>
void launch_split(const KvCacheAttentionParams& params, const SplitPlan& plan,
                  const SplitParams& split_params, cudaStream_t stream) {
    if (plan.row_tiles == 0) return;
    with_split_config<Arch, kHeadDim, kHeadDimV>(params, [&](auto config) {
        using Config = decltype(config);
        static std::atomic<uint64_t> allowed{0};
        launch_splits<Arch>(split_kernel<Config>, params, plan, Config::threads(plan.sets),
                            SplitSharedStorage<Config>::bytes(plan.sets), split_params, allowed,
                            stream);
    });
}

}  // namespace decode
}  // namespace flash_attn_norm
