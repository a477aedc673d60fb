#pragma once

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/row_tiles.h"

namespace flash_attn_norm {
namespace decode {

/// Where the rows of a set's tiles lie in the cache, for one warp, which copies rows [first_row,
/// first_row + kKeysPerWarp) of each tile. In a paged cache lane i looks up row i % kKeysPerWarp,
/// by one division and one read of the page table, begun a tile ahead of its use: pages of every
/// size cost the same.
template <class Config>
struct KvRows {
    using CacheElement = typename Config::CacheElement;
    const CacheElement* k;  // of the head: entry 0 (the sequence's own without pages), row 0
    const CacheElement* v;
    const int32_t* pages = nullptr;  // of the sequence; null: no pages, or none in use
    int key_begin, key_end;          // the other keys are filled with zeros and not read
    int first_position;              // of key 0
    int first_row;
    int first_key = 0;       // of the tile that was looked up, this warp's
    int entry = 0, row = 0;  // of this lane's key there; the entry unchecked

    __device__ __forceinline__ KvRows(const SplitParams& params, const SplitBlock& block,
                                      const KeyRange& keys, int first_row_in_tile)
        : k(static_cast<const CacheElement*>(params.k_cache) +
            block.kv_head * params.cache.k_strides.head),
          v(static_cast<const CacheElement*>(params.v_cache) +
            block.kv_head * params.cache.v_strides.head),
          key_begin(keys.begin),
          key_end(keys.end),
          first_position(block.first_position),
          first_row(first_row_in_tile) {
        const KvCacheLayout& cache = params.cache;
        if (cache.is_paged) {
            pages = cache.page_table + block.batch * cache.page_table_stride;
        } else {
            // Inside the cache, or the sequence has no keys
            const int64_t own =
                cache.cache_batch_idx != nullptr ? cache.cache_batch_idx[block.batch] : block.batch;
            k += own * cache.k_strides.batch;
            v += own * cache.v_strides.batch;
        }
    }

    __device__ __forceinline__ void look_up(const SplitParams& params, int tile) {
        first_key = tile * Config::kTileKeys + first_row;
        if (pages == nullptr) return;
        const int key = first_key + static_cast<int>(threadIdx.x % 32) % Config::kKeysPerWarp;
        // Keys that are not read stand where one that is read lies.
        const int position = first_position + max(min(key, key_end - 1), key_begin);
        const uint32_t page = params.page_rows.divide(static_cast<uint32_t>(position));
        row = position - static_cast<int>(page * params.page_rows.value);
        entry = pages[page];
    }

    /// True if every row of the tile is read.
    __device__ __forceinline__ bool is_whole() const {
        return first_key >= key_begin && first_key + Config::kKeysPerWarp <= key_end;
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
