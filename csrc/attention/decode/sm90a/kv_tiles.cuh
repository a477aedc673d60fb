#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"
#include "attention/decode/sm90a/bulk_config.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace decode {

/// How a warp has the copy engine bring a sequence's tiles: a lane makes one copy of each, of some
/// rows that lie on one page and of a chunk of their columns.
template <class Tile>
class TileCopies {
  public:
    /// Where the lane's rows of a tile lie.
    struct Place {
        int entry = 0, row = 0;
    };

    __device__ __forceinline__ TileCopies(const SplitParams& params, const SplitBlock& block,
                                          const KeyRange& positions, int copy_rows)
        : params_(params),
          kv_head_(block.kv_head),
          copy_rows_(copy_rows),
          copies_(Tile::kRows / copy_rows),
          copy_(static_cast<int>(threadIdx.x) % 32 / Tile::kChunks),
          chunk_(static_cast<int>(threadIdx.x) % 32 % Tile::kChunks),
          last_(max(positions.end - 1, 0) / copy_rows) {
        const KvCacheLayout& cache = params.cache;
        if (cache.is_paged) {
            pages_ = cache.page_table + block.batch * cache.page_table_stride;
        } else {
            // Packed sequences share a single entry.
            own_entry_ = cache.cache_batch_idx != nullptr
                             ? cache.cache_batch_idx[block.batch]
                             : min(block.batch, static_cast<int>(cache.num_entries) - 1);
        }
    }

    /// Rows behind the last position are those of that one's page again.
    __device__ __forceinline__ Place find(int tile) const {
        const int position = min(tile * copies_ + copy_, last_) * copy_rows_;
        if (pages_ == nullptr) return Place{own_entry_, position};
        const uint32_t page = params_.page_rows.divide(static_cast<uint32_t>(position));
        return Place{pages_[page], position - static_cast<int>(page * params_.page_rows.value)};
    }

    /// The warp's copy of a whole tile to `slot`, as soon as that is empty.
    __device__ __forceinline__ void load(const Place& place, const CUtensorMap* map, uint32_t slot,
                                         uint64_t& full, uint64_t& empty, uint32_t parity) const {
        if (threadIdx.x % 32 == 0) {
            ptx::mbarrier_wait(ptx::shared_address(&empty), parity);
            ptx::mbarrier_arrive_expect_tx(ptx::shared_address(&full), Tile::kBytes);
        }
        __syncwarp();
        copy(place, map, slot, ptx::shared_address(&full));
        __syncwarp();
    }

  private:
    /// The lane's part of the tile at `slot`; `full` counts its bytes.
    __device__ __forceinline__ void copy(const Place& place, const CUtensorMap* map, uint32_t slot,
                                         uint32_t full) const {
        if (copy_ >= copies_) return;
        const int last_entry = static_cast<int>(params_.cache.num_entries) - 1;
        const int offset = chunk_ * Tile::kChunkBytes + copy_ * copy_rows_ * Tile::kRowBytes;
        ptx::tma_load_4d(slot + static_cast<uint32_t>(offset), map, full,
                         chunk_ * Tile::kChunkColumns, place.row, kv_head_,
                         max(min(place.entry, last_entry), 0));
    }

    const SplitParams& params_;
    const int32_t* pages_ = nullptr;  // of the sequence; null: no pages
    int own_entry_ = 0;
    int kv_head_;
    int copy_rows_, copies_;  // of a tile
    int copy_, chunk_;        // this lane's
    int last_;                // copy with keys, counted over the sequence
};

/// By one thread, before the others use them: the barriers of the stages, a full and an empty one
/// each for keys and values, of which `readers` warps say that they are through with them.
template <class Storage>
__device__ __forceinline__ void init_kv_stages(const BulkParams& bulk, Storage& shared, int stages,
                                               int readers) {
    ptx::prefetch_tensormap(&bulk.map_k);
    ptx::prefetch_tensormap(&bulk.map_v);
    for (int i = 0; i < stages; ++i) {
        ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.v_full[i]), 1);
        ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]), readers);
        ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[i]), readers);
    }
    ptx::fence_mbarrier_init();
}

/// The producer warp: has the copy engine fill the stages with the tiles of keys and of values.
template <class Tile, class Storage>
__device__ __forceinline__ void load_kv_tiles(const BulkParams& bulk, Storage& shared,
                                              const SplitBlock& block, const KeyRange& positions,
                                              const KeyRange& tiles, int stages) {
    const TileCopies<Tile> copies(bulk.split, block, positions, bulk.copy_rows);
    const uint32_t ring = ptx::shared_address(shared.tiles());
    int stage = 0;
    uint32_t parity = 1;  // the stages are free at first
    auto next = copies.find(tiles.begin);
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const auto place = next;
        next = copies.find(tile + 1);  // a read of the page table, begun a tile ahead
        const uint32_t slot = ring + static_cast<uint32_t>(stage * Storage::kStageBytes);
        copies.load(place, &bulk.map_k, slot, shared.k_full[stage], shared.k_empty[stage], parity);
        copies.load(place, &bulk.map_v, slot + Tile::kBytes, shared.v_full[stage],
                    shared.v_empty[stage], parity);
        if (++stage == stages) stage = 0, parity ^= 1;
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
