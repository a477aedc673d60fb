#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/bwd_cluster_config.h"
#include "attention/sm90/bwd_round_unit.cuh"
#include "ptx/atomic.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduction.cuh"
#include "ptx/tma.cuh"

/// What the first warpgroup of the backward kernel for head dims above 128 does: one thread loads,
/// one warp claims query blocks.
namespace flash_attn_norm {
namespace sm90 {

/// Addresses inside a CTA's shared memory, in its own state space: one register and constants.
template <class Config>
struct BwdClusterAddresses {
    using Shared = BwdClusterStorage<Config>;
    uint32_t base;

    __device__ __forceinline__ uint32_t k() const { return at(offsetof(Shared, k)); }
    __device__ __forceinline__ uint32_t v() const { return at(offsetof(Shared, v)); }
    __device__ __forceinline__ uint32_t partner_k() const {
        return at(offsetof(Shared, partner_k));
    }
    __device__ __forceinline__ uint32_t q(int s) const {
        return at(offsetof(Shared, q) + s * Config::QLayout::kBytes);
    }
    __device__ __forceinline__ uint32_t dout() const { return at(offsetof(Shared, dout)); }
    __device__ __forceinline__ uint32_t ds(uint32_t parity) const {
        return at(offsetof(Shared, ds)) + parity * Config::SLayout::kBytes;
    }
    __device__ __forceinline__ uint32_t partner_ds(uint32_t parity) const {
        return at(offsetof(Shared, partner_ds)) + parity * Config::SLayout::kBytes;
    }
    __device__ __forceinline__ uint32_t weights() const { return at(offsetof(Shared, weights)); }
    __device__ __forceinline__ uint32_t lse_log2(int s) const {
        return at(offsetof(Shared, lse_log2) + s * Config::kBlockM * 4);
    }
    __device__ __forceinline__ uint32_t delta() const { return at(offsetof(Shared, delta)); }
    __device__ __forceinline__ uint32_t kv_full() const { return at(offsetof(Shared, kv_full)); }
    __device__ __forceinline__ uint32_t q_full(int s) const {
        return at(offsetof(Shared, q_full) + s * 8);
    }
    __device__ __forceinline__ uint32_t q_free(int s) const {
        return at(offsetof(Shared, q_free) + s * 8);
    }
    __device__ __forceinline__ uint32_t dout_full() const {
        return at(offsetof(Shared, dout_full));
    }
    __device__ __forceinline__ uint32_t dout_free() const {
        return at(offsetof(Shared, dout_free));
    }
    __device__ __forceinline__ uint32_t ds_full(uint32_t parity) const {
        return at(offsetof(Shared, ds_full) + parity * 8);
    }
    __device__ __forceinline__ uint32_t ds_free(uint32_t parity) const {
        return at(offsetof(Shared, ds_free) + parity * 8);
    }
    __device__ __forceinline__ uint32_t dq_go(uint32_t parity) const {
        return at(offsetof(Shared, dq_go) + parity * 8);
    }
    __device__ __forceinline__ uint32_t dq_free() const { return at(offsetof(Shared, dq_free)); }

  private:
    __device__ __forceinline__ uint32_t at(size_t offset) const {
        return base + static_cast<uint32_t>(offset);
    }
};

/// Copies a tile of Layout, chunk by chunk from column `column` on.
template <class Layout>
__device__ __forceinline__ void load_chunks(uint32_t destination, const CUtensorMap* map,
                                            uint32_t barrier, int column, int row, int head,
                                            int batch) {
#pragma unroll 1
    for (int c = 0; c < Layout::kChunks; ++c) {
        ptx::tma_load_4d(destination + static_cast<uint32_t>(c * Layout::kChunkBytes), map, barrier,
                         column + c * Layout::kChunkColumns, row, head, batch);
    }
}

/// Loads K, V and the partner's K. One thread.
template <class Config>
__device__ __forceinline__ void load_keys(const BwdClusterAddresses<Config>& shared,
                                          const BwdTile& tile, const BwdArgs& args, int rank) {
    using KLayout = typename Config::KLayout;
    using VLayout = typename Config::VLayout;
    using PartnerKLayout = typename Config::PartnerKLayout;
    const int batch = tile.batch;
    const int partner_row = tile.key_row + (rank == 0 ? Config::kBlockN : -Config::kBlockN);
    const uint32_t kv_full = shared.kv_full();
    ptx::mbarrier_arrive_expect_tx(kv_full,
                                   KLayout::kBytes + VLayout::kBytes + PartnerKLayout::kBytes);
    load_chunks<KLayout>(shared.k(), &args.k, kv_full, 0, tile.key_row, tile.kv_head, batch);
    load_chunks<VLayout>(shared.v(), &args.v, kv_full, 0, tile.key_row, tile.kv_head, batch);
    load_chunks<PartnerKLayout>(shared.partner_k(), &args.k, kv_full, rank * Config::kHeadDim / 2,
                                partner_row, tile.kv_head, batch);
}

/// Loads Q with its LSE and dO with its delta, block by block. One thread.
template <class Config>
__device__ __forceinline__ void load_queries(const BwdClusterAddresses<Config>& shared,
                                             const BwdTile& tile, const BwdArgs& args) {
    using QLayout = typename Config::QLayout;
    using DoutLayout = typename Config::DoutLayout;
    constexpr uint32_t kRowsBytes = Config::kBlockM * 4;
    const int batch = tile.batch;
    uint32_t count = 0;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int row = tile.query_row + tile.begin * Config::kBlockM;
        int64_t tile_row =
            (int64_t{head} * tile.tiles_per_head + tile.first_tile + tile.begin) * Config::kBlockM;
#pragma unroll 1
        for (int block = tile.begin; block < tile.end; ++block, ++count) {
            const int s = static_cast<int>(count % Config::kStages);
            // The first round finds everything free.
            wait_barrier(shared.q_free(s), count / Config::kStages % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(shared.q_full(s), QLayout::kBytes + kRowsBytes);
            load_chunks<QLayout>(shared.q(s), &args.q, shared.q_full(s), 0, row, head, batch);
            ptx::bulk_load(shared.lse_log2(s), args.workspace.lse_log2 + tile_row, kRowsBytes,
                           shared.q_full(s));
            wait_barrier(shared.dout_free(), count % 2 ^ 1);
            ptx::mbarrier_arrive_expect_tx(shared.dout_full(), DoutLayout::kBytes + kRowsBytes);
            load_chunks<DoutLayout>(shared.dout(), &args.dout, shared.dout_full(), 0, row, head,
                                    batch);
            ptx::bulk_load(shared.delta(), args.workspace.delta + tile_row, kRowsBytes,
                           shared.dout_full());
            row += Config::kBlockM;
            tile_row += Config::kBlockM;
        }
    }
}

/// When this CTA may write its half of a query block's dQ. `parts` is the half's entry of dq_turn.
///
/// If the first part is stored, whoever comes first claims the block and the others wait until it
/// has stored. Deterministic sums take the tiles that a query block meets from left to right.
struct ClusterDqOrder {
    bool in_turns, first_stores;

    /// Returns when this CTA may write, and whether it stores instead of adding. One thread.
    template <class Config>
    __device__ __forceinline__ bool enter(const BwdTile& tile, int rank, int* parts,
                                          int block) const {
        if (in_turns) {
            const int tile_key = tile.first_key - rank * Config::kBlockN;
            const int first_tile = max(0, block * Config::kBlockM + tile.left) / Config::kTileKeys;
            const int turn = tile_key / Config::kTileKeys - first_tile;
            wait_flag(parts, turn);
            return first_stores && turn == 0;
        }
        const int state = ptx::atom_acquire_cas(parts, kNoDq, kDqClaimed);
        if (state == kDqClaimed) wait_flag(parts, kDqStored);
        return state == kNoDq;
    }
};

/// Waits at each step for this CTA's turn to write its half of dQ, tells the consumers, and says
/// that it is written to those who wait for it. One warp. A step's turn is asked for when the step
/// before is over, and CTAs come to query blocks in the same order: who waits at one, with its
/// partner, holds none before it, so that the lowest one goes on.
template <class Config>
__device__ __forceinline__ void order_dq(const BwdClusterAddresses<Config>& shared,
                                         BwdClusterStorage<Config>& storage, const BwdArgs& args,
                                         int rank) {
    const BwdTile& tile = storage.tile;
    const bool leader = threadIdx.x % 32 == 0;
    const ClusterDqOrder order{args.params.deterministic, args.first_stores_dq};
    const int64_t tiles = int64_t{tile.tiles_per_head} * args.params.problem.num_heads_q;
    uint32_t count = 0;
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        int* parts = args.workspace.dq_turn + rank * tiles + int64_t{head} * tile.tiles_per_head +
                     tile.first_tile + tile.begin;
#pragma unroll 1
        for (int block = tile.begin; block < tile.end; ++block, ++parts, ++count) {
            if (count != 0) {
                const uint32_t last = count - 1;
                wait_barrier(shared.q_free(static_cast<int>(last % Config::kStages)),
                             last / Config::kStages % 2);
            }
            int is_first = 0;
            if (leader) {
                is_first = order.enter<Config>(tile, rank, parts, block);
                storage.dq_is_first[count % 2] = is_first;
                ptx::mbarrier_arrive(shared.dq_go(count % 2));
            }
            if (order.in_turns || __shfl_sync(0xffffffffu, is_first, 0) != 0) {
                ptx::bar_sync(kDqReady, kHandOverThreads);  // all have written
                if (leader) ptx::red_release_add(parts, 1);
            }
        }
    }
}

/// Lets the consumers add to dQ when their unit's sums are zeros, and counts the tile when they
/// have. One warp.
template <class Config>
__device__ __forceinline__ void count_tile(const BwdClusterAddresses<Config>& shared,
                                           BwdClusterStorage<Config>& storage, const BwdArgs& args,
                                           int rank) {
    constexpr int kThreads = Config::kConsumers + 32;
    const UnitCounter unit(storage.tile, args, rank);
    unit.enter();
    if (unit.is_leader) ptx::mbarrier_arrive(shared.dq_free());
    __syncwarp();
    ptx::bar_sync(kTileAdded, kThreads);
    unit.leave<kThreads>(storage.rounds_unit);
}

}  // namespace sm90
}  // namespace flash_attn_norm
