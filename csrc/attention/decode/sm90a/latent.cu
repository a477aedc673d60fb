#include <atomic>
#include <cstdint>

#include "attention/attention_device.h"
#include "attention/decode/launch.h"
#include "attention/decode/sm90a/cache_map.h"
#include "attention/decode/sm90a/latent_kernel.cuh"
#include "attention/decode/sm90a/launch.h"

namespace flash_attn_norm {
namespace decode {

namespace {

template <class Config>
void launch_latent_config(const KvCacheAttentionParams& params, const SplitPlan& plan,
                          const SplitParams& split_params, cudaStream_t stream) {
    LatentParams latent;
    latent.split = split_params;
    latent.map = cache_map(params, params.k_cache, params.cache.k_strides, params.problem.head_dim,
                           Config::kTileKeys, Config::KTile::kChunkColumns);
    static std::atomic<uint64_t> allowed{0};
    launch_splits<Sm90>(latent_split_kernel<Config>, params, plan, Config::kThreads,
                        static_cast<int>(sizeof(LatentSharedStorage<Config>)), latent, allowed,
                        stream);
}

}  // namespace

SplitPlan plan_latent(const KvCacheAttentionParams& params) {
    using Config = LatentConfig<BFloat16>;  // the types are alike
    SplitShape shape;
    shape.block_m = Config::kBlockM;
    shape.tile_keys = Config::kTileKeys;
    shape.sets = shape.more_sets = 1;
    shape.num_sms = attention_device_limits().num_sms;
    shape.key_bytes = 2 * params.problem.head_dim;
    return plan_splits(params, shape);
}

void launch_latent(const KvCacheAttentionParams& params, const SplitPlan& plan,
                   const SplitParams& split_params, cudaStream_t stream) {
    if (plan.row_tiles == 0) return;
    if (params.problem.dtype == DType::kBFloat16) {
        launch_latent_config<LatentConfig<BFloat16>>(params, plan, split_params, stream);
    } else {
        launch_latent_config<LatentConfig<Float16>>(params, plan, split_params, stream);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
