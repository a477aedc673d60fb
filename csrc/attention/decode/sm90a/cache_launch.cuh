#pragma once

#include <type_traits>

#include "attention/decode/plan.h"
#include "attention/decode/sm90a/bulk_config.h"
#include "attention/decode/sm90a/cache_map.h"
#include "attention/element.cuh"

/// What the launches of bulk_split_kernel and tall_split_kernel share.
namespace flash_attn_norm {
namespace decode {

/// What a kernel with tiles Config::Tile of keys and of values is told.
template <class Config>
BulkParams bulk_params(const KvCacheAttentionParams& params, const SplitPlan& plan,
                       const SplitParams& split_params) {
    BulkParams bulk;
    bulk.split = split_params;
    bulk.in_cluster = plan.in_cluster;
    bulk.copy_rows = bulk_copy_rows(params.cache, Config::kTileKeys);
    bulk.map_k = cache_map(params, params.k_cache, params.cache.k_strides, params.problem.head_dim,
                           bulk.copy_rows, Config::Tile::kChunkColumns);
    bulk.map_v = cache_map(params, params.v_cache, params.cache.v_strides,
                           params.problem.head_dim_v, bulk.copy_rows, Config::Tile::kChunkColumns);
    return bulk;
}

/// Calls fn(element, is_float8): the type of the products with this call's cache, and whether that
/// is float8.
template <class Fn>
void with_cache_types(const KvCacheAttentionParams& params, Fn&& fn) {
    if (params.cache.is_float8) {
        fn(Float16{}, std::true_type{});
    } else if (params.problem.dtype == DType::kBFloat16) {
        fn(BFloat16{}, std::false_type{});
    } else {
        fn(Float16{}, std::false_type{});
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
