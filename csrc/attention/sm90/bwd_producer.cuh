#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/sm90/bwd_addresses.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_config.h"
#include "attention/sm90/bwd_round_unit.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk_store.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduction.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"

/// What the first warpgroup of the backward kernel for head dims up to 128 does: one thread loads,
/// one warp adds dQ.
namespace flash_attn_norm {
namespace sm90 {

/// Loads K and V; their bytes are still to be announced at kv_full. One thread.
template <class Config>
__device__ __forceinline__ void load_keys(const BwdAddresses<Config>& shared, const BwdTile& tile,
                                          const BwdArgs& args) {
    using KLayout = typename Config::KLayout;
#pragma unroll 1
    for (int c = 0; c < KLayout::kChunks; ++c) {
        const int column = c * KLayout::kChunkColumns;
        const uint32_t bytes = static_cast<uint32_t>(c * KLayout::kChunkBytes);
        ptx::tma_load_4d(shared.k() + bytes, &args.k, shared.kv_full(), column, tile.key_row,
                         tile.kv_head, tile.batch);
        ptx::tma_load_4d(shared.v() + bytes, &args.v, shared.kv_full(), column, tile.key_row,
                         tile.kv_head, tile.batch);
    }
}

/// Loads Q with its LSE and dO with its delta, block by block. One thread.
/// `count`: steps of this CTA so far.
template <class Config>
__device__ __forceinline__ void load_queries(const BwdAddresses<Config>& shared,
                                             const BwdTile& tile, const BwdArgs& args,
                                             uint32_t& count) {
    using QLayout = typename Config::QLayout;
    constexpr uint32_t kRowsBytes = Config::kBlockM * 4;
    const int batch = tile.batch;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        const int64_t first_tile = int64_t{head} * tile.tiles_per_head + tile.first_tile;
#pragma unroll 1
        for (int i = 0; i < tile.end - tile.begin; ++i, ++count) {
            const int block = tile.block(i);
            const int row = tile.query_row + block * Config::kBlockM;
            const int64_t tile_row = (first_tile + block) * Config::kBlockM;
            const int s = static_cast<int>(count % Config::kStages);
            const uint32_t parity = count / Config::kStages % 2 ^ 1;  // the first round is free
            ptx::mbarrier_wait(shared.q_free(s), parity);
            ptx::mbarrier_arrive_expect_tx(shared.q_full(s), QLayout::kBytes + kRowsBytes);
#pragma unroll 1
            for (int c = 0; c < QLayout::kChunks; ++c) {
                ptx::tma_load_4d(shared.q(s) + static_cast<uint32_t>(c * QLayout::kChunkBytes),
                                 &args.q, shared.q_full(s), c * QLayout::kChunkColumns, row, head,
                                 batch);
            }
            ptx::bulk_load(shared.lse_log2(s), args.workspace.lse_log2 + tile_row, kRowsBytes,
                           shared.q_full(s));
            ptx::mbarrier_wait(shared.dout_free(s), parity);
            ptx::mbarrier_arrive_expect_tx(shared.dout_full(s), QLayout::kBytes + kRowsBytes);
#pragma unroll 1
            for (int c = 0; c < QLayout::kChunks; ++c) {
                ptx::tma_load_4d(shared.dout(s) + static_cast<uint32_t>(c * QLayout::kChunkBytes),
                                 &args.dout, shared.dout_full(s), c * QLayout::kChunkColumns, row,
                                 head, batch);
            }
            ptx::bulk_load(shared.delta(s), args.workspace.delta + tile_row, kRowsBytes,
                           shared.dout_full(s));
        }
    }
}

/// destination = source, word after word, in few registers.
__device__ __forceinline__ void copy_words(BwdTile& destination, const BwdTile& source) {
    static_assert(sizeof(BwdTile) % 4 == 0, "whole words");
#pragma unroll 4
    for (size_t i = 0; i < sizeof(BwdTile) / 4; ++i) {
        reinterpret_cast<int*>(&destination)[i] = reinterpret_cast<const int*>(&source)[i];
    }
}

/// Finds the tiles of this CTA, one after the other, and loads what they need. One thread.
///
/// The first tile is the CTA's own, and when all loads of one are on their way it draws the next:
/// so the tiles start in their order, and a CTA that has short ones gets more. Deterministic sums
/// wait for tiles of lower index, so every index is drawn by a CTA that runs; it goes through its
/// tiles in their order, so that the lowest one in work waits for nobody.
template <class Config>
__device__ __forceinline__ void produce_tiles(const BwdAddresses<Config>& shared,
                                              BwdSharedStorage<Config>& storage,
                                              const BwdArgs& args) {
    const auto draw = [&] {
        const int first = args.params.deterministic ? 0 : static_cast<int>(gridDim.x);
        return first + atomicAdd(args.workspace.counters, 1);
    };
    int index = args.params.deterministic ? draw() : static_cast<int>(blockIdx.x);
    // Counted in shared memory: registers are short here.
    const auto tiles_begun = [&] { return ptx::ld_shared_u32(shared.tiles_begun()); };
    uint32_t count = 0;
#pragma unroll 1
    for (;;) {
        BwdTile& tile = storage.ahead[tiles_begun() % 2];
        ptx::mbarrier_wait(shared.tile_free(tiles_begun() % 2), tiles_begun() / 2 % 2 ^ 1);
        tile.head_begin = tile.head_end = 0;
#pragma unroll 1
        while (index < args.tiles) {
            tile.find<Config::kBlockN, Config::kBlockN, Config::kBlockM>(args, index, 0);
            if (tile.used()) break;
            if (tiles_begun() == 0) ptx::griddepcontrol_wait();
            index = Config::kPersists ? draw() : args.tiles;
        }
        ptx::mbarrier_arrive(shared.tile_full(tiles_begun() % 2));
        ptx::mbarrier_wait(shared.kv_free(), tiles_begun() % 2 ^ 1);
        const bool ends = index >= args.tiles;  // with an unused tile
        if (!ends) load_keys(shared, tile, args);
        copy_words(storage.tile, tile);  // while they are on their way
        const bool first = tiles_begun() == 0;
        storage.tiles_begun = tiles_begun() + 1;
        if (ends) {
            ptx::mbarrier_arrive(shared.kv_full());
            ptx::griddepcontrol_wait();
            return;
        }
        ptx::mbarrier_arrive_expect_tx(shared.kv_full(), 2 * Config::KLayout::kBytes);
        if (first) ptx::griddepcontrol_wait();  // for LSE, delta and the ticket
        load_queries(shared, tile, args, count);
        if (!Config::kPersists) return;
        index = draw();
    }
}

/// How one thread adds to the sums of dQ, query block after query block. `parts` is the block's
/// entry of dq_turn.
///
/// If the first part of a block is stored, so that nobody has to write zeros before, the first CTA
/// that comes claims the block. The others wait until it has stored; it runs, and waits for nobody
/// before it has. Deterministic sums take the key blocks that a query block meets from left to
/// right, each waits for its turn: their CTAs drew lower tickets.
template <class Config>
struct DqOrder {
    bool in_turns, first_stores;
    bool is_first = false;  // this CTA stores

    __device__ __forceinline__ explicit DqOrder(const BwdArgs& args)
        : in_turns(args.params.deterministic), first_stores(args.first_stores_dq) {}

    /// Returns when this CTA may write its part.
    __device__ __forceinline__ void enter(const BwdTile& tile, int* parts, int block, int state) {
        if (in_turns) {
            const int first_key = max(0, block * Config::kBlockM + tile.left);
            const int turn =
                (tile.first_key - first_key / Config::kBlockN * Config::kBlockN) / Config::kBlockN;
            wait_flag(parts, turn);
            is_first = first_stores && turn == 0;
        } else if (first_stores) {
            is_first = state == kNoDq;
            if (state == kDqClaimed) wait_flag(parts, kDqStored);
        }
    }

    __device__ __forceinline__ void write(float* part, uint32_t source) const {
        if (is_first) {
            ptx::bulk_store(part, source, Config::kDqEntries * 4);
        } else {
            ptx::bulk_reduce_add_f32(part, source, Config::kDqEntries * 4);
        }
        ptx::bulk_commit_group();
    }

    __device__ __forceinline__ int claim(int* parts) const {
        if (in_turns || !first_stores || parts == nullptr) return kNoDq;
        const int state = ptx::atom_acquire_cas(parts, kNoDq, kDqClaimed);
        ptx::fence_proxy_async_global();  // what was stored may be added to by the copy engine
        return state;
    }

    /// Says that this CTA's part is in memory, where others wait for it, and claims the next block.
    __device__ __forceinline__ int leave(int* parts, int* next_parts) const {
        int state = kNoDq;
        if (in_turns || is_first) {
            // The claim is on its way while the part is.
            if (!in_turns && next_parts != nullptr) {
                state = ptx::atom_relaxed_cas(next_parts, kNoDq, kDqClaimed);
            }
            ptx::bulk_wait_group<0>();
            ptx::red_release_add(parts, 1);
            return state == kNoDq ? kNoDq : kDqClaimed;  // seen without order: looks again
        }
        return claim(next_parts);
    }
};

/// Adds dQ of each step of a tile to the sums in memory, as the consumers put it down. One warp.
template <class Config>
__device__ __forceinline__ void reduce_dq(const BwdAddresses<Config>& shared, const BwdTile& tile,
                                          const BwdArgs& args) {
    constexpr int kTileEntries = Config::kBlockM * Config::kHeadDim;
    const bool leader = threadIdx.x % 32 == 0;
    DqOrder<Config> order(args);
    const int blocks = tile.end - tile.begin;
    int64_t first_tile = int64_t{tile.head_begin} * tile.tiles_per_head + tile.first_tile;
    int64_t dq_tile = Config::kPersists ? first_tile : first_dq_tile(tile, args);
    int* parts = args.workspace.dq_turn + first_tile + tile.start;
    int state = leader && blocks > 0 ? order.claim(parts) : kNoDq;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            const int block = tile.block(i);
            float* sums = args.workspace.dq_accum + (dq_tile + block) * kTileEntries;
            if (leader) order.enter(tile, parts, block, state);
#pragma unroll
            for (int w = 0; w < Config::kWarpgroups; ++w) {
                ptx::bar_sync(kDqReady + w, kHandOverThreads);
                if (leader) order.write(sums + w * Config::kDqEntries, shared.dq(w));
            }
#pragma unroll
            for (int w = 0; w < Config::kWarpgroups; ++w) {
                if (leader) {
                    if (w == Config::kWarpgroups - 1) {
                        ptx::bulk_wait_group_read<0>();
                    } else {
                        ptx::bulk_wait_group_read<Config::kWarpgroups - 1>();
                    }
                }
                __syncwarp();
                ptx::bar_arrive(kDqFree + w, kHandOverThreads);
            }
            const bool last_of_head = i + 1 == blocks;
            if (last_of_head) {
                first_tile += tile.tiles_per_head;
                dq_tile += Config::kPersists ? tile.tiles_per_head : dq_tiles_per_head(tile, args);
            }
            const bool last = last_of_head && head + 1 == tile.head_end;
            int* next_parts =
                last ? nullptr
                     : args.workspace.dq_turn + first_tile + tile.block(last_of_head ? 0 : i + 1);
            if (leader) state = order.leave(parts, next_parts);
            parts = next_parts;
        }
    }
}

/// The same of a tile, and its part in its unit's sums where this kernel rounds them.
template <class Config>
__device__ __forceinline__ void reduce_dq_of_tile(const BwdAddresses<Config>& shared,
                                                  const BwdTile& tile, const BwdArgs& args,
                                                  int& rounds_unit) {
    const bool rounds = !Config::kPersists && args.dq_units > 0;
    if (rounds) UnitCounter(tile, args, /*half=*/0).enter();
    if (Config::kZeroesLater && args.units_ahead > 0) {
        if (threadIdx.x % 32 == 0) wait_for_zeros</*kShares=*/1>(tile, args);
        __syncwarp();
    }
    reduce_dq(shared, tile, args);
    if (rounds) {
        if (threadIdx.x % 32 == 0) ptx::bulk_wait_group<0>();
        UnitCounter(tile, args, /*half=*/0).leave<Config::kConsumers + 32>(rounds_unit);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
