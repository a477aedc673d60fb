#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"
#include "attention/decode/sm90a/bulk_config.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace decode {

/// Where the keys of a sequence lie in the cache, copy_rows at a time: copy c has positions
/// copy_rows * c and on, which lie on one page. On pages, every lane of a warp looks up the copy as
/// many further on as it counts, 32 at a time.
struct TilePlaces {
    const int32_t* pages = nullptr;  // null: no pages
    int copy_rows;
    int own_entry = 0;
    int entry = 0, row = 0;  // this lane's

    __device__ __forceinline__ TilePlaces(const SplitParams& params, const SplitBlock& block,
                                          int rows)
        : copy_rows(rows) {
        const KvCacheLayout& cache = params.cache;
        if (cache.is_paged) {
            pages = cache.page_table + block.batch * cache.page_table_stride;
        } else {
            // Packed sequences share a single entry.
            own_entry = cache.cache_batch_idx != nullptr
                            ? cache.cache_batch_idx[block.batch]
                            : min(block.batch, static_cast<int>(cache.num_entries) - 1);
        }
    }

    /// Called by a whole warp, for a sequence's copies in turn: the i-th one is `copy`. One behind
    /// the last position takes the place of that.
    __device__ __forceinline__ void find(const SplitParams& params, const KeyRange& positions,
                                         int copy, int i, int& copy_entry, int& copy_row) {
        if (pages == nullptr) {
            copy_entry = own_entry;
            copy_row = copy * copy_rows;
            return;
        }
        if (i % 32 == 0) {
            const int lane = static_cast<int>(threadIdx.x) % 32;
            const int position = min(copy + lane, (positions.end - 1) / copy_rows) * copy_rows;
            const uint32_t page = params.page_rows.divide(static_cast<uint32_t>(position));
            row = position - static_cast<int>(page * params.page_rows.value);
            entry = max(min(pages[page], static_cast<int>(params.cache.num_entries) - 1), 0);
        }
        copy_entry = __shfl_sync(0xffffffffu, entry, i % 32);
        copy_row = __shfl_sync(0xffffffffu, row, i % 32);
    }
};

/// The producer warp: has the copy engine fill the stages with the tiles of keys and of values.
template <class Config>
__device__ __forceinline__ void load_kv_tiles(const BulkParams& bulk,
                                              BulkSharedStorage<Config>& shared,
                                              const SplitBlock& block, const KeyRange& positions,
                                              const KeyRange& tiles, int stages) {
    using Tile = typename Config::Tile;
    TilePlaces places(bulk.split, block, bulk.copy_rows);
    const int copies = Config::kTileKeys / bulk.copy_rows;
    const bool is_leader = threadIdx.x % 32 == 0;
    const uint32_t ring = ptx::shared_address(shared.tiles());
    int stage = 0;
    uint32_t parity = 1;  // the stages are free at first
    const auto load_tile = [&](int tile, const CUtensorMap* map, uint64_t& full, uint64_t& empty,
                               uint32_t slot) {
        if (is_leader) {
            ptx::mbarrier_wait(ptx::shared_address(&empty), parity);
            ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), Tile::kBytes);
        }
        __syncwarp();
#pragma unroll 1
        for (int copy = 0; copy < copies; ++copy) {
            int entry, row;
            places.find(bulk.split, positions, tile * copies + copy,
                        (tile - tiles.begin) * copies + copy, entry, row);
            if (!is_leader) continue;
#pragma unroll
            for (int c = 0; c < Tile::kChunks; ++c) {
                const int offset = c * Tile::kChunkBytes + copy * bulk.copy_rows * Tile::kRowBytes;
                ptx::tma_load_4d(slot + static_cast<uint32_t>(offset), map,
                                 ptx::shared_address(&full), c * Tile::kChunkColumns, row,
                                 block.kv_head, entry);
            }
        }
        __syncwarp();
    };
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const uint32_t slot =
            ring + static_cast<uint32_t>(stage * BulkSharedStorage<Config>::kStageBytes);
        load_tile(tile, &bulk.map_k, shared.k_full[stage], shared.k_empty[stage], slot);
        load_tile(tile, &bulk.map_v, shared.v_full[stage], shared.v_empty[stage],
                  slot + Tile::kBytes);
        if (++stage == stages) stage = 0, parity ^= 1;
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
