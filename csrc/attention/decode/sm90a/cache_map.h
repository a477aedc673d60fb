#pragma once

#include <cuda.h>

#include "attention/params.h"

namespace flash_attn_norm {
namespace decode {

/// The map of k_cache or v_cache whose boxes are `rows` rows of a chunk of a TileLayout, 64 or 32
/// elements of two bytes; pairs of them, if the cache is float8.
CUtensorMap cache_map(const KvCacheAttentionParams& params, const void* cache,
                      const TensorStrides& strides, int head_dim, int rows, int chunk_columns);

}  // namespace decode
}  // namespace flash_attn_norm
