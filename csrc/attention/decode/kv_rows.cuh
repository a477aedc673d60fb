#pragma once

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/row_tiles.h"
#include "ptx/cp_async.cuh"

namespace flash_attn_norm {
namespace decode {

/// Where the rows of a set's tiles lie in the cache, for one warp, which copies rows [first_row,
/// first_row + kKeysPerWarp) of each tile. Lane i looks up row i % kKeysPerWarp: one division and
/// one read of the page table, begun a tile ahead of its use, so that pages of every size cost the
/// same.
template <class Config>
struct KvRows {
    const uint16_t* k = nullptr;  // of the head: entry 0 (or the sequence's), row 0
    const uint16_t* v = nullptr;
    const int32_t* pages = nullptr;  // of the sequence; null: no pages
    uint32_t page_rows = 1;
    int last_entry = 0;
    int key_begin = 0, key_end = 0;  // the other keys are filled with zeros and not read
    int first_position = 0;          // of key 0
    int first_row = 0;
    int first_key = 0;       // of the tile that was looked up, this warp's
    int entry = 0, row = 0;  // of this lane's key there; the entry unchecked

    __device__ __forceinline__ KvRows(const KvCacheAttentionParams& params, const SplitBlock& block,
                                      const KeyRange& keys, int first_row_in_tile)
        : key_begin(keys.begin),
          key_end(keys.end),
          first_position(block.first_position),
          first_row(first_row_in_tile) {
        const KvCacheLayout& cache = params.cache;
        k = static_cast<const uint16_t*>(params.k_cache) + block.kv_head * cache.k_strides.head;
        v = static_cast<const uint16_t*>(params.v_cache) + block.kv_head * cache.v_strides.head;
        if (cache.page_table != nullptr) {
            pages = cache.page_table + block.batch * cache.page_table_stride;
            page_rows = static_cast<uint32_t>(cache.entry_rows);
            last_entry = static_cast<int>(cache.num_entries - 1);
        } else {
            // Inside the cache, or the sequence has no keys
            const int64_t own =
                cache.cache_batch_idx != nullptr ? cache.cache_batch_idx[block.batch] : block.batch;
            k += own * cache.k_strides.batch;
            v += own * cache.v_strides.batch;
        }
    }

    __device__ __forceinline__ void look_up(int tile) {
        first_key = tile * Config::kTileKeys + first_row;
        const int key = first_key + static_cast<int>(threadIdx.x % 32) % Config::kKeysPerWarp;
        // Keys that are not read stand where one that is read lies.
        row = first_position + max(min(key, key_end - 1), key_begin);
        if (pages != nullptr) {
            const uint32_t page = static_cast<uint32_t>(row) / page_rows;
            row -= static_cast<int>(page * page_rows);
            entry = pages[page];
        }
    }

    __device__ __forceinline__ int checked_entry() const { return max(min(entry, last_entry), 0); }
};

}  // namespace decode
}  // namespace flash_attn_norm
