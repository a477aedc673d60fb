#include <algorithm>

#include "attention/attention_device.h"
#include "attention/decode/sm90a/bulk_config.h"
#include "attention/decode/sm90a/cache_map.h"
#include "attention/decode/sm90a/latent_config.h"
#include "attention/decode/sm90a/launch.h"
#include "attention/decode/sm90a/tall_config.h"
#include "attention/sm90/encode_stream_map.h"
#include "attention/sm90/tensor_map.h"

namespace flash_attn_norm {
namespace decode {

namespace {

/// As elements of two bytes.
sm90::TensorShape shape_of_cache(const KvCacheAttentionParams& params, int head_dim) {
    const int columns = params.cache.is_float8 ? (head_dim + 15) / 16 * 8 : head_dim;
    return sm90::TensorShape{params.cache.num_entries, params.cache.entry_rows,
                             params.problem.num_heads_kv, columns};
}

TensorStrides strides_of_cache(const KvCacheAttentionParams& params, const TensorStrides& strides) {
    if (!params.cache.is_float8) return strides;
    return TensorStrides{strides.batch / 2, strides.row / 2, strides.head / 2};
}

/// Code for sm_90a runs on capability 9.0 and nowhere else.
bool is_hopper() {
    const DeviceLimits& device = attention_device_limits();
    return device.capability_major == 9 && device.capability_minor == 0;
}

bool has_rows(const KvCacheLayout& cache) {
    return cache.num_entries > 0 && cache.entry_rows > 0;
}

}  // namespace

bool can_map_cache(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    const KvCacheLayout& cache = params.cache;
    return sm90::can_map_tensor(shape_of_cache(params, problem.head_dim),
                                strides_of_cache(params, cache.k_strides), params.k_cache) &&
           sm90::can_map_tensor(shape_of_cache(params, problem.head_dim_v),
                                strides_of_cache(params, cache.v_strides), params.v_cache);
}

CUtensorMap cache_map(const KvCacheAttentionParams& params, const void* cache,
                      const TensorStrides& strides, int head_dim, int rows, int chunk_columns) {
    const sm90::TensorShape shape = shape_of_cache(params, head_dim);
    const TensorStrides pairs = strides_of_cache(params, strides);
    return sm90::encode_stream_map(chunk_columns == 64
                                       ? sm90::tensor_map_shape<64>(shape, pairs, rows)
                                       : sm90::tensor_map_shape<32>(shape, pairs, rows),
                                   cache, params.problem.dtype);
}

bool bulk_takes_shapes(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    const int larger = std::max(problem.head_dim, problem.head_dim_v);
    return is_hopper() && larger <= 256 && packed_rows_per_sequence(params) <= 16 &&
           has_rows(params.cache) &&
           bulk_copy_rows(params.cache, bulk_tile_keys(larger, params.cache.is_float8)) > 0;
}

bool tall_takes_shapes(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    return is_hopper() && std::max(problem.head_dim, problem.head_dim_v) <= 256 &&
           packed_rows_per_sequence(params) > 16 && has_rows(params.cache) &&
           bulk_copy_rows(params.cache, kTallTileKeys) > 0;
}

bool latent_takes_shapes(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    const KvCacheLayout& cache = params.cache;
    return is_hopper() && !cache.is_float8 && problem.head_dim > 256 &&
           problem.head_dim >= problem.head_dim_v && has_rows(cache) &&
           (!cache.is_paged || cache.entry_rows % kLatentTileKeys == 0);
}

}  // namespace decode
}  // namespace flash_attn_norm
