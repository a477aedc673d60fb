#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/fwd_arguments.h"
#include "attention/sm90/fwd_shared_storage.h"
#include "attention/sm90/fwd_work.h"
#include "attention/sm90/pipeline.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// The rows of a head that a tile takes, from `row` on.
struct TileSource {
    const CUtensorMap* map;
    int row, head, batch;
};

/// Has the copy engine fill a ring's next buffer, once nobody reads what is in it.
template <class Layout, ptx::L2Hint kHint, int kStages>
__device__ __forceinline__ void load_tile(SharedTile<Layout> (&ring)[kStages],
                                          Mbarrier (&ring_full)[kStages],
                                          Mbarrier (&ring_empty)[kStages],
                                          PipelineState<kStages>& state, const TileSource& source) {
    Mbarrier& full = ring_full[state.index];
    ring_empty[state.index].wait(state.parity);
    full.arrive_expect_bytes(Layout::kBytes);
    const uint32_t tile = ptx::shared_address(ring[state.index].bytes);
#pragma unroll 1
    for (int c = 0; c < Layout::kChunks; ++c) {
        ptx::tma_load_4d<kHint>(tile + c * Layout::kChunkBytes, source.map, full.address(),
                                c * Layout::kChunkColumns, source.row, source.head, source.batch);
    }
    state.advance();
}

/// The producer: one thread that has the copy engine fill the rings, tile by
/// tile, until no tile is left. Blocks of keys go from right to left. K runs
/// one block ahead of V, as the consumers use them.
template <class Config>
__device__ __forceinline__ void load_kv_tiles(FwdSharedStorage<Config>& shared,
                                              const FwdArguments& arguments) {
    using LayoutQ = typename Config::LayoutQ;
    using LayoutK = typename Config::LayoutK;
    using LayoutV = typename Config::LayoutV;
    constexpr bool kHints = Config::kTile.evict_hints;
    constexpr ptx::L2Hint kKeep = kHints ? ptx::L2Hint::kEvictLast : ptx::L2Hint::kNormal;
    constexpr ptx::L2Hint kOnce = kHints ? ptx::L2Hint::kEvictFirst : ptx::L2Hint::kNormal;
    const AttentionProblem& problem = arguments.params.problem;
    PipelineState<Config::kQStages> q_state;
    PipelineState<Config::kStages> k_state, v_state;
    q_state.parity = k_state.parity = v_state.parity = 1;

#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
        shared.work_full.wait(round & 1);
        if (shared.work.is_end()) return;
        const int begin = shared.work.blocks.begin, end = shared.work.blocks.end;
        const int head = shared.work.head, kv_head = head / problem.group_size();
        const int batch = problem.is_packed() ? 0 : shared.work.sequence;
        const int row_q = shared.work.row_q + shared.work.block * Config::kBlockM;
        const int row_k = shared.work.row_k;
        if (begin >= end) {
            shared.work_empty.arrive();
            continue;
        }
        const auto load_q = [&] {
            load_tile<LayoutQ, kOnce>(shared.q, shared.q_full, shared.q_empty, q_state,
                                      TileSource{&arguments.map_q, row_q, head, batch});
        };
        const auto load_k = [&](int n_block) {
            const int row = row_k + n_block * Config::kBlockN;
            load_tile<LayoutK, kKeep>(shared.k, shared.k_full, shared.k_empty, k_state,
                                      TileSource{&arguments.map_k, row, kv_head, batch});
        };
        const auto load_v = [&](int n_block) {
            const int row = row_k + n_block * Config::kBlockN;
            load_tile<LayoutV, kKeep>(shared.v, shared.v_full, shared.v_empty, v_state,
                                      TileSource{&arguments.map_v, row, kv_head, batch});
        };

        // From here on the next tile may be claimed: late, for a tile that is
        // claimed early may start late while others idle; yet two loads of K before
        // the last, for looking it up takes time.
        const int claim_at = min(end - 2, begin + 1);
        if (claim_at < begin) shared.work_empty.arrive();
        if (Config::kLoadsQAhead) {
            load_q();
            load_k(end - 1);
        } else {  // the only Q tile is still in use: K of this tile can go ahead
            load_k(end - 1);
            load_q();
        }
#pragma unroll 1
        for (int n_block = end - 2; n_block >= begin; --n_block) {
            if (n_block == claim_at) shared.work_empty.arrive();
            load_k(n_block);
            load_v(n_block + 1);
        }
        load_v(begin);
    }
}

/// Lists the tiles of a packed call that has few of them. One warp.
template <class Config>
__device__ __forceinline__ void list_few_tiles(FwdSharedStorage<Config>& shared,
                                               const AttentionFwdParams& params) {
    const AttentionProblem& problem = params.problem;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int count = 0;
    if (lane <= static_cast<int>(problem.batch_size)) {
        count = tile_counts(problem, lane, Config::kBlockM, /*short_rows=*/0, params.least_rows)
                    .in_long;
    }
    int end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
    }
    const int begin = end - count;
    // cu_seqlens that do not ascend may ask for more tiles than there are rows for.
    for (int i = begin; i < min(end, kFewTiles); ++i) {
        shared.few_tiles[i] = PackedTile{lane, i - begin};
    }
    if (lane == 31) shared.num_few_tiles = min(end, kFewTiles);
}

/// The scheduler: one thread of another warp that finds the next tile and
/// describes it to all.
template <class Config>
__device__ __forceinline__ void schedule_tiles(FwdSharedStorage<Config>& shared,
                                               const FwdArguments& arguments) {
    const AttentionProblem& problem = arguments.params.problem;
    FwdTileWalk walk = arguments.walk;
    if (arguments.lists_few_tiles) {
        walk.list.tiles = shared.few_tiles;
        walk.blocks = shared.num_few_tiles;
    } else {
        if (walk.list.tiles != nullptr) ptx::griddepcontrol_wait();  // for the kernel that lists
        walk.load_count();
    }
    const int num_tiles = static_cast<int>(walk.count());
    const int stride = static_cast<int>(gridDim.x);
    const bool counted = arguments.tile_counter != nullptr;
    const auto claim = [&](int index) {
        return counted ? stride + atomicAdd(arguments.tile_counter, 1) : index + stride;
    };
    int index = static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
        FwdWork work;
#pragma unroll 1
        for (; index < num_tiles; index = claim(index)) {
            walk.find(index, work);
            if (complete_work(problem, Config::kBlockM, Config::kBlockN, work)) break;
        }
        if (index >= num_tiles) work.block = -1;
        // A tile that is known beforehand was looked up while the last one was
        // still in use.
        if (!counted && round > 0) shared.work_empty.wait((round - 1) & 1);
        shared.work = work;
        shared.work_full.arrive();
        if (work.is_end()) return;
        if (counted) shared.work_empty.wait(round & 1);
        index = claim(index);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
