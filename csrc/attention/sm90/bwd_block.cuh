#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/mask.h"
#include "attention/online_softmax.cuh"
#include "attention/sm90/bwd_tile_order.h"
#include "attention/tile_scheduler.h"
#include "ptx/bulk_store.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduction.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"

/// What the backward kernels of Hopper share.
namespace flash_attn_norm {
namespace sm90 {

/// Named barriers of the backward kernels; 0 is __syncthreads(). kDqReady and kDqFree are one for
/// each consumer warpgroup.
enum BwdBarrier : int {
    kConsumersMeet = 1,
    kDqReady = 2,
    kDqFree = 4,
    kTileAdded = 6,    // all that a tile adds to dQ is on its way
    kTileCounted = 7,  // known whether it was its unit's last
    kUnitRounded = 8,
    kWeightsReady = 9,  // the weights of a step's dS are in shared memory
    kWeightsFree = 10,
    kScoresStored = 11,  // a step's dS is
    kRowsStored = 12,    // one for each consumer warpgroup: its gradient is
};
constexpr int kHandOverThreads = 128 + 32;  // of a warpgroup and the warp that takes its dQ

/// Of dq_turn when sums are not in turns: what is known of a query block's dQ.
enum DqState : int { kNoDq = 0, kDqClaimed = 1, kDqStored = 2 };

/// Arguments of a main kernel.
struct BwdArgs {
    CUtensorMap q, k, v, dout, dk, dv;
    AttentionBwdParams params;
    BwdWorkspace workspace;
    BwdTileOrder order;
    int tiles = 0;
    bool first_stores_dq = false;  // see BwdPassOptions
    // Tiles without a mask start at different query blocks, each at its own first key, so that the
    // first one that comes to a query block is not followed closely by others who would wait.
    bool rotates_queries = false;
    int dq_units = 0;     // see BwdPlan; not 0: the main kernel rounds dQ
    int units_ahead = 0;  // see BwdPlan; not 0: the main kernel zeroes sums of dQ
    int head_splits = 1;
    int heads_per_split = 1;  // query heads of a unit
    Divisor by_heads;         // num_heads_kv * head_splits
    // Of dq_accum and of dk_accum; per sequence in dense problems only.
    int query_tiles_per_head = 0, query_tiles_per_sequence = 0;
    int key_tiles_per_head = 0, key_tiles_per_sequence = 0;
};

/// One CTA's share of the backward pass: the block of keys that it holds, the query heads of the
/// group and the query blocks that pass by. One thread finds it and leaves it in shared memory, so
/// that no registers keep it during the main loop.
struct BwdTile {
    // Keys
    int batch = 0;  // to multiply a stride with
    int kv_head = 0;
    int key_row = 0;     // first row of the block in k and v
    int first_key = 0;   // likewise, inside the sequence
    int keys = 0;        // of the sequence from there on; none if not positive
    int accum_tile = 0;  // of dk_accum and dv_accum
    // Queries
    int head_begin = 0, head_end = 0;
    int query_row = 0;  // first row of the sequence in q
    int seqlen_q = 0;
    int shift = 0;       // seqlen_k - seqlen_q
    int sequence = 0;    // the batch entry, packed or not
    int left = 0;        // row i sees keys from i + left on
    int first_tile = 0;  // of head 0: tiles are counted over [num_heads_q, query slots]
    int tiles_per_head = 0;
    int begin = 0, end = 0;            // query blocks
    int start = 0;                     // the first of them in time, see block()
    int full_begin = 0, full_end = 0;  // of these, those without a masked score
    // Key first_key + j is seen by the rows i with j + row_begin <= i < j + row_end, cut to ints.
    int row_begin = 0, row_end = 0;

    /// False for a slot of a packed problem that no keys fall into.
    __device__ __forceinline__ bool used() const { return head_begin < head_end; }
    __device__ __forceinline__ bool has_queries() const { return begin < end; }
    /// The query block of step i of a head: from `start` to the end, then the ones before.
    __device__ __forceinline__ int block(int i) const {
        const int next = start + i;
        return next < end ? next : next - (end - begin);
    }

    /// Becomes tile `index` of `args`, kTileKeys keys, of which this CTA has kKeys from `offset`
    /// on. All of its CTAs go through the same query blocks.
    template <int kTileKeys, int kKeys, int kBlockM>
    __device__ void find(const BwdArgs& args, int index, int offset);
};

/// Which rows see a key, in 32 bits: sequences are shorter than 2^30 here, and windows are cut to
/// them, which changes nothing.
struct KeyWindow {
    int seqlen_q;
    int to_row;       // key j stands at row j + to_row of the diagonal
    int left, right;  // of the window; -1: no bound

    __device__ __forceinline__ static KeyWindow make(const AttentionProblem& problem, int seqlen_q,
                                                     int seqlen_k) {
        const auto cut = [](int64_t window, int seqlen) {
            return window > seqlen ? seqlen : static_cast<int>(window);
        };
        return KeyWindow{seqlen_q, seqlen_q - seqlen_k, cut(problem.window_left, seqlen_k),
                         cut(problem.window_right, seqlen_q)};
    }
    /// First row that sees key j, not yet cut to the sequence.
    __device__ __forceinline__ int row_begin(int j) const { return j + to_row - right; }
    __device__ __forceinline__ int row_end(int j) const { return j + to_row + left + 1; }
    /// The same, of the sequence's rows.
    __device__ __forceinline__ int first_row(int j) const {
        return right < 0 ? 0 : max(0, row_begin(j));
    }
    __device__ __forceinline__ int last_row_end(int j) const {
        return left < 0 ? seqlen_q : max(0, min(seqlen_q, row_end(j)));
    }

    /// query_blocks() of tile_scheduler.h.
    template <int kBlockM>
    __device__ __forceinline__ BlockRange query_blocks(int key_begin, int key_end) const {
        const auto block = [](int row) {
            return static_cast<int>(static_cast<unsigned>(row) / kBlockM);
        };
        BlockRange range;
        const int begin = first_row(key_begin), end = last_row_end(key_end - 1);
        if (begin >= end || key_begin >= key_end) return range;
        range.begin = block(begin);
        range.end = block(end + kBlockM - 1);
        range.full_begin = block(first_row(key_end - 1) + kBlockM - 1);
        range.full_end = block(last_row_end(key_begin));
        return range;
    }
};

template <int kTileKeys, int kKeys, int kBlockM>
__device__ __forceinline__ void BwdTile::find(const BwdArgs& args, int index, int offset) {
    const AttentionProblem& problem = args.params.problem;
    const BwdTileOrder::Tile place = args.order.tile(index);
    const int heads = problem.num_heads_kv * args.head_splits;
    const int unit_sequence = args.by_heads.quotient(place.unit);
    const int head_split = place.unit - unit_sequence * heads;
    BwdTile& tile = *this;
    tile.batch = tile.key_row = tile.query_row = 0;
    tile.head_begin = tile.head_end = 0;  // unused
    int seqlen_k = 0, first_key_tile = 0, block = place.block;
    if (problem.is_packed()) {
        const BlockSlots slots = BlockSlots::keys(problem, kTileKeys);
        tile.sequence = static_cast<int>(slots.batch_of(block));
        block -= static_cast<int>(slots.first_slot(tile.sequence));
        const SeqlenInfo info =
            seqlen_info_or_uncovered(problem, tile.sequence, /*of_queries=*/false);
        tile.seqlen_q = static_cast<int>(info.seqlen_q);
        seqlen_k = static_cast<int>(info.seqlen_k);
        if (block < 0 || block * kTileKeys >= seqlen_k) return;  // an unused slot
        tile.query_row = static_cast<int>(info.row_q);
        tile.key_row = static_cast<int>(info.row_k);
        tile.first_tile =
            static_cast<int>(BlockSlots::queries(problem, kBlockM).first_slot(tile.sequence));
        first_key_tile =
            static_cast<int>(BlockSlots::keys(problem, kKeys).first_slot(tile.sequence));
    } else {
        tile.sequence = tile.batch = unit_sequence;
        tile.seqlen_q = static_cast<int>(problem.seqlen_q);
        seqlen_k = static_cast<int>(problem.seqlen_k);
        tile.first_tile = unit_sequence * args.query_tiles_per_sequence;
        first_key_tile = unit_sequence * args.key_tiles_per_sequence;
    }
    const int tile_key = block * kTileKeys, first_key = tile_key + offset;
    tile.kv_head = args.head_splits == 1 ? head_split : head_split / args.head_splits;
    tile.key_row += first_key;
    tile.first_key = first_key;
    tile.keys = seqlen_k - first_key;
    tile.accum_tile = tile.kv_head * args.key_tiles_per_head + first_key_tile + first_key / kKeys;
    tile.head_begin = head_split * args.heads_per_split;
    tile.head_end = tile.head_begin + args.heads_per_split;
    tile.tiles_per_head = args.query_tiles_per_head;

    const auto window = KeyWindow::make(problem, tile.seqlen_q, seqlen_k);
    const BlockRange range =
        window.query_blocks<kBlockM>(tile_key, min(tile_key + kTileKeys, seqlen_k));
    tile.begin = range.begin;
    tile.end = range.end;
    if (tile.keys < kKeys) {
        tile.full_begin = tile.full_end = range.end;  // keys past the sequence are masked
    } else {
        const BlockRange own = window.query_blocks<kBlockM>(first_key, first_key + kKeys);
        // Rows past a dense sequence are zeros with probability 0 and need no mask.
        const bool open = !problem.is_packed() && window.left < 0;
        tile.full_begin = max(range.begin, min(own.full_begin, range.end));
        tile.full_end = max(tile.full_begin, open ? range.end : min(own.full_end, range.end));
    }
    tile.start = tile.begin;
    if (args.rotates_queries && tile.full_begin == tile.begin && tile.full_end == tile.end &&
        tile.has_queries()) {
        tile.start += first_key / kBlockM % (tile.end - tile.begin);
    }
    tile.shift = -window.to_row;
    tile.left = window.left < 0 ? -tile.seqlen_q : tile.shift - window.left;
    const auto cut = [&](int row) { return max(-seqlen_k, min(row, tile.seqlen_q)); };
    tile.row_begin = window.right < 0 ? -seqlen_k : cut(window.row_begin(first_key));
    tile.row_end = window.left < 0 ? tile.seqlen_q : cut(window.row_end(first_key));
}

/// Waits for the phase of this parity. The cluster kernel is faster with this loop, the other one
/// with ptx::mbarrier_wait().
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait(barrier, parity)) {
    }
}

/// Waits until `count` CTAs have signalled at `flag`.
__device__ __forceinline__ void wait_flag(const int* flag, int count) {
    while (ptx::ld_acquire(flag) < count) __nanosleep(100);
    ptx::fence_proxy_async_global();  // what they wrote may be added to by the copy engine
}

/// Fills rows [first_row, kRows) of a tile with zeros: what lies there belongs to the next packed
/// sequence and may be NaN, which a probability of 0 does not remove. Called by kThreads threads;
/// the tile may be read after fence and barrier.
template <class Layout, int kThreads>
__device__ __forceinline__ void zero_rows(unsigned char* tile, int first_row, int thread) {
    constexpr int kUnits = Layout::kRowBytes / 16;
    const int units = (Layout::kRows - first_row) * kUnits;
#pragma unroll 1
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
        uint4* begin =
            reinterpret_cast<uint4*>(tile + chunk * Layout::kChunkBytes) + first_row * kUnits;
#pragma unroll 1
        for (int i = thread; i < units; i += kThreads) begin[i] = make_uint4(0, 0, 0, 0);
    }
}

/// The same of two tiles by all consumers, which meet then.
template <class Layout, int kThreads>
__device__ __forceinline__ void zero_foreign_rows(unsigned char* a, unsigned char* b,
                                                  int first_row) {
    const int thread = static_cast<int>(threadIdx.x) - 128;
    zero_rows<Layout, kThreads>(a, first_row, thread);
    zero_rows<Layout, kThreads>(b, first_row, thread);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(kConsumersMeet, kThreads);
}

/// Writes the tile of a gradient, in shared memory, to its place. kThreads threads; number 0 has
/// bulk stores to commit and wait for.
template <class Layout, int kThreads>
__device__ __forceinline__ void store_gradient_tile(const unsigned char* rows,
                                                    const CUtensorMap* map, void* gradient,
                                                    int head_dim, const BwdTile& tile,
                                                    const AttentionProblem& problem, int thread) {
    if (problem.is_packed() && tile.keys < Layout::kRows) {  // the next sequence's rows follow
        const int64_t row_stride = int64_t{problem.num_heads_kv} * head_dim;
        uint16_t* out = static_cast<uint16_t*>(gradient) + tile.key_row * row_stride +
                        int64_t{tile.kv_head} * head_dim;
        const int units = head_dim / 8;
#pragma unroll 1
        for (int i = thread; i < tile.keys * units; i += kThreads) {
            const int row = i / units, unit = i % units;
            *reinterpret_cast<uint4*>(out + row * row_stride + unit * 8) =
                *reinterpret_cast<const uint4*>(rows + Layout::unit_offset(row, unit));
        }
    } else if (thread == 0) {
#pragma unroll 1
        for (int c = 0; c < Layout::kChunks; ++c) {
            ptx::tma_store_4d(map, ptx::shared_address(rows + c * Layout::kChunkBytes),
                              c * Layout::kChunkColumns, tile.key_row, tile.kv_head, tile.batch);
        }
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
