#pragma once

#include <cuda_runtime.h>

#include "attention/decode/split_params.h"

namespace flash_attn_norm {
namespace decode {

/// The kernels of capability 9.0 that the copy engine feeds. Whether they take a call's shapes:
/// head dims up to 256 and pages of a multiple of 16 rows, few packed rows or more, or latent
/// attention and pages of a multiple of 64.
bool bulk_takes_shapes(const KvCacheAttentionParams& params);
bool tall_takes_shapes(const KvCacheAttentionParams& params);
bool latent_takes_shapes(const KvCacheAttentionParams& params);

/// True if the cache has rows that a tensor map describes. The latent kernel also wants
/// values_in_keys().
bool can_map_cache(const KvCacheAttentionParams& params);

/// One definition per size class, in bulk_hdim*.cu and tall_hdim*.cu.
template <int kHeadDim>
SplitPlan plan_bulk(const KvCacheAttentionParams& params);
template <int kHeadDim>
void launch_bulk(const KvCacheAttentionParams& params, const SplitPlan& plan,
                 const SplitParams& split_params, cudaStream_t stream);

template <int kHeadDim>
SplitPlan plan_tall(const KvCacheAttentionParams& params);
template <int kHeadDim>
void launch_tall(const KvCacheAttentionParams& params, const SplitPlan& plan,
                 const SplitParams& split_params, cudaStream_t stream);

SplitPlan plan_latent(const KvCacheAttentionParams& params);
void launch_latent(const KvCacheAttentionParams& params, const SplitPlan& plan,
                   const SplitParams& split_params, cudaStream_t stream);

}  // namespace decode
}  // namespace flash_attn_norm
