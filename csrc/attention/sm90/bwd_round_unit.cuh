#pragma once

#include <cstdint>

#include "attention/sm90/bwd_block.cuh"
#include "ptx/atomic.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/reduction.cuh"
#include "ptx/streaming_load.cuh"

/// How a main kernel turns the sums of dQ into dq. Units (see BwdTileOrder) share dq_units places:
/// whoever adds to a unit last rounds its sums, which the L2 cache still has, and leaves zeros for
/// the unit that has the place next. Tiles start in the order of their units, so the unit before
/// in a place is at work or done, and waits for none after it.
namespace flash_attn_norm {
namespace sm90 {

/// The unit of a tile of a dense problem.
__device__ __forceinline__ int unit_of(const BwdTile& tile, const BwdArgs& args) {
    const int heads = args.params.problem.num_heads_kv * args.head_splits;
    return tile.sequence * heads + tile.head_begin / args.heads_per_split;
}

/// The first query block of the tile's first head among the sums of dQ.
__device__ __forceinline__ int64_t first_dq_tile(const BwdTile& tile, const BwdArgs& args) {
    if (args.dq_units == 0) return int64_t{tile.head_begin} * tile.tiles_per_head + tile.first_tile;
    return int64_t{unit_of(tile, args) % args.dq_units} * args.heads_per_split *
           args.query_tiles_per_sequence;
}
/// From head to head.
__device__ __forceinline__ int dq_tiles_per_head(const BwdTile& tile, const BwdArgs& args) {
    return args.dq_units == 0 ? tile.tiles_per_head : args.query_tiles_per_sequence;
}

/// Zeroes this tile's share of the sums of dQ of the unit that comes units_ahead later, and counts
/// it: kShares for each tile, of which this is number `share`. One warp.
template <int kTileKeys, int kTileEntries, int kShares>
__device__ __forceinline__ void zero_later_sums(const BwdTile& tile, const BwdArgs& args,
                                                int share) {
    const int unit = unit_of(tile, args) + args.units_ahead;
    if (unit >= args.workspace.units) return;
    const int heads = args.params.problem.num_heads_kv * args.head_splits;
    const int sequence = unit / heads, head_begin = unit % heads * args.heads_per_split;
    const int blocks = args.query_tiles_per_sequence, shares = args.order.blocks * kShares;
    const int number = tile.first_key / kTileKeys * kShares + share;
    const int begin = static_cast<int>(int64_t{number} * blocks / shares);
    const int end = static_cast<int>((int64_t{number} + 1) * blocks / shares);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int head = head_begin; head < head_begin + args.heads_per_split; ++head) {
        const int64_t first = int64_t{head} * tile.tiles_per_head + int64_t{sequence} * blocks;
        float4* sums = reinterpret_cast<float4*>(args.workspace.dq_accum +
                                                 (first + begin) * int64_t{kTileEntries});
#pragma unroll 4
        for (int i = lane; i < (end - begin) * (kTileEntries / 4); i += 32) {
            sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    __syncwarp();
    if (lane == 0) ptx::red_release_add(args.workspace.units_done + unit, 1);
}
/// Waits until the sums of the tile's unit are zeros. One thread.
template <int kShares>
__device__ __forceinline__ void wait_for_zeros(const BwdTile& tile, const BwdArgs& args) {
    const int unit = unit_of(tile, args);
    if (unit < args.units_ahead) return;
    wait_flag(args.workspace.units_done + unit, args.order.blocks * kShares);
}

/// How one warp follows a unit. `half`: of the columns of dQ, where different CTAs add to them.
struct UnitCounter {
    int* done;  // tiles that have added, and one more: zeros for the next unit
    const BwdArgs& args;
    int unit;
    bool is_leader;  // of the warp

    __device__ __forceinline__ UnitCounter(const BwdTile& tile, const BwdArgs& arguments, int half)
        : args(arguments), unit(unit_of(tile, arguments)), is_leader(threadIdx.x % 32 == 0) {
        done = args.workspace.units_done + half * args.workspace.units + unit;
    }
    /// Waits until the sums are zeros.
    __device__ __forceinline__ void enter() const {
        if (is_leader && unit >= args.dq_units) {
            wait_flag(done - args.dq_units, args.order.blocks + 1);
        }
    }
    /// The tile has added; `rounds_unit` says to the consumers whether it was the last. kThreads:
    /// consumers and this warp.
    template <int kThreads>
    __device__ __forceinline__ void leave(int& rounds_unit) const {
        int is_last = 0;
        if (is_leader) {
            is_last = ptx::atom_acq_rel_add(done, 1) + 1 == args.order.blocks;
            rounds_unit = is_last;
        }
        is_last = __shfl_sync(0xffffffffu, is_last, 0);
        ptx::bar_arrive(kTileCounted, kThreads);
        if (is_last == 0) return;
        ptx::bar_sync(kUnitRounded, kThreads);
        if (is_leader) ptx::red_release_add(done, 1);
    }
};

/// One thread's sums of its warpgroup's part of a query block, as they were added: of 64 rows and
/// columns, or (kTransposed) of 64 columns and 8 kVectors rows.
template <class Element, int kVectors, bool kTransposed>
struct DqSums {
    float4 values[kVectors];

    __device__ __forceinline__ void load(const float* sums) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) values[i] = ptx::ld_global_cg(sums + i * 512);
    }
    __device__ __forceinline__ static void clear(float* sums) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            *reinterpret_cast<float4*>(sums + i * 512) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    /// Two rows of 8 columns, or 8 columns of two rows: this thread's two elements of each.
    __device__ __forceinline__ uint2 rounded(int i, float scale) const {
        const float4& x = values[i];
        const uint2 pairs = make_uint2(Element::pack(x.x * scale, x.y * scale),
                                       Element::pack(x.z * scale, x.w * scale));
        if (!kTransposed) return pairs;
        return make_uint2(ptx::movmatrix_trans(pairs.x), ptx::movmatrix_trans(pairs.y));
    }
    /// Writes them, rounded, from row 0 and column 0 of the part at `rows`. The threads of a quad
    /// have two columns each of two rows (or sets of 8 columns), twice; they exchange them, so
    /// that each has 8 columns of one row.
    __device__ __forceinline__ void store(uint16_t* rows, int64_t row_stride, int rows_left,
                                          int columns_left, float scale) const {
        const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
        const int odd = lane % 2, high = lane / 2 % 2;
#pragma unroll
        for (int i = 0; i < kVectors; i += 2) {
            uint2 halves[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint2 x = rounded(i + j, scale);
                const uint32_t other = __shfl_xor_sync(0xffffffffu, odd != 0 ? x.x : x.y, 1);
                halves[j] = odd != 0 ? make_uint2(other, x.y) : make_uint2(x.x, other);
            }
            const uint2 sent = high != 0 ? halves[0] : halves[1];
            const uint2 kept = high != 0 ? halves[1] : halves[0];
            const uint2 other = make_uint2(__shfl_xor_sync(0xffffffffu, sent.x, 2),
                                           __shfl_xor_sync(0xffffffffu, sent.y, 2));
            const int across = thread / 32 * 16 + 8 * odd, along = 8 * (i + high);
            const int row = (kTransposed ? along : across) + lane / 4;
            const int column = kTransposed ? across : along;
            if (row < rows_left && column < columns_left) {
                *reinterpret_cast<uint4*>(rows + row * row_stride + column) =
                    high != 0 ? make_uint4(other.x, other.y, kept.x, kept.y)
                              : make_uint4(kept.x, kept.y, other.x, other.y);
            }
        }
    }
};

/// Rounds the sums of the tile's unit. All consumers; `part` counts their warpgroups over the parts
/// of a query block, each 64 of its columns or (Config::kDqByRows) rows.
template <class Config>
__device__ __forceinline__ void round_unit(const BwdTile& tile, const BwdArgs& args, int part) {
    using Sums = DqSums<typename Config::Element, Config::kDqRegisters / 4, Config::kDqTransposed>;
    constexpr int kTileEntries = Config::kBlockM * Config::kHeadDim;
    const AttentionProblem& problem = args.params.problem;
    const int64_t row_stride = int64_t{problem.num_heads_q} * problem.head_dim;
    const int blocks = args.query_tiles_per_sequence;
    const int first_row = Config::kDqByRows ? 64 * part : 0, column = 64 * part - first_row;
    const bool has_next = unit_of(tile, args) + args.dq_units < args.workspace.units;
    float* sums = args.workspace.dq_accum + first_dq_tile(tile, args) * kTileEntries +
                  part * (128 * Config::kDqRegisters) + static_cast<int>(threadIdx.x) % 128 * 4;
    Sums next;
    next.load(sums);
#pragma unroll 1
    for (int head = tile.head_begin; head < tile.head_end; ++head) {
        uint16_t* rows = static_cast<uint16_t*>(args.params.dq) +
                         (int64_t{tile.sequence} * problem.seqlen_q + first_row) * row_stride +
                         int64_t{head} * problem.head_dim + column;
        int rows_left = static_cast<int>(problem.seqlen_q) - first_row;
#pragma unroll 1
        for (int block = 0; block < blocks; ++block) {
            const Sums current = next;
            float* const place = sums;
            sums += kTileEntries;
            if (block + 1 < blocks || head + 1 < tile.head_end) next.load(sums);
            if (has_next) Sums::clear(place);
            current.store(rows, row_stride, rows_left, problem.head_dim - column,
                          problem.softmax_scale);
            rows += Config::kBlockM * row_stride;
            rows_left -= Config::kBlockM;
        }
    }
}

/// The consumers' side of UnitCounter::leave().
template <class Config>
__device__ __forceinline__ void finish_unit(const BwdTile& tile, const BwdArgs& args, int part,
                                            const int& rounds_unit) {
    constexpr int kThreads = Config::kConsumers + 32;
    ptx::bar_sync(kTileCounted, kThreads);
    if (rounds_unit == 0) return;
    round_unit<Config>(tile, args, part);
    __syncwarp();
    ptx::bar_arrive(kUnitRounded, kThreads);
}

}  // namespace sm90
}  // namespace flash_attn_norm
