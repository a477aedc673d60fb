#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/tile_scheduler.h"

namespace flash_attn_norm {

/// How a tile of fp32 sums lies in memory: in the order of the main kernel's registers, so that
/// each warp adds contiguous bytes at a time. With vector = 1 entry i of thread t is at
/// i * threads + t. With vector = 4 a warpgroup's part is contiguous, and entries 4 i to 4 i + 3 of
/// its thread t are at 4 (i * 128 + t).
struct AccumulatorLayout {
    int rows = 0;
    int columns = 0;
    int threads = 0;
    int warps_rows = 0;       // warp w holds row group w % warps_rows, column group w / warps_rows
    int tiles_rows = 0;       // tiles of 16 rows of a warp
    int tiles_columns = 0;    // tiles of 8 columns of a warp
    int vector = 1;           // entries of a thread that lie side by side
    bool transposed = false;  // the warps' tiles are those of the transposed sums

    FAN_HOST_DEVICE int64_t entries() const { return int64_t{rows} * columns; }
};

/// Parts of AttentionBwdParams::workspace. Rows come in slots of BlockSlots, padded to whole
/// blocks.
struct BwdWorkspace {
    int* counters = nullptr;    // zeroed before the main kernel: ticket, dq_turn, bias_turn
    int* dq_turn = nullptr;     // [2, num_heads_q, query slots] parts added in turns, or DqState
    int* bias_turn = nullptr;   // [1 | num_heads_q, query slots or blocks, key blocks] likewise
    float* lse_log2 = nullptr;  // [num_heads_q, query slots, block_m], +inf: the row has no weight
    float* delta = nullptr;     // like lse_log2: sum of dout * out, less dsoftmax_lse
    float* sink_parts = nullptr;  // [num_heads_q, query slots] (ds_aux wanted)
    float* bias_parts = nullptr;  // [num_heads_q, total_k]: sums over rows (a bias without rows)
    int* units_done = nullptr;    // [2, units] tiles that have added to dQ (sums for dq_units), or
                                  // that have zeroed its sums (units_ahead)
    float* dq_accum = nullptr;    // [num_heads_q, query slots, block_m * head dim class], or
                                  // [dq_units, heads of a unit, query slots of a sequence, ...]
    float* dk_accum = nullptr;    // [num_heads_kv, key slots, ...] (head split)
    float* dv_accum = nullptr;
    int64_t units = 0;  // of units_done
    int64_t units_per_batch_entry = 0;
    int64_t zeroed_units = 0;  // whose sums of dQ bwd_preprocess() zeroes; 0: all
    int64_t dq_tiles = 0;      // of dq_accum
    int64_t counter_bytes = 0;
    int64_t accum_bytes = 0;  // of dk_accum and dv_accum together
    int64_t total_bytes = 0;
};

/// CTAs that share the query heads of a K/V head: the fewest that divide the group and give at
/// least `wanted` CTAs; all of the group if that is still too few.
inline int head_splits(int group_size, int64_t ctas, int64_t wanted) {
    for (int splits = 1; splits < group_size; ++splits) {
        if (group_size % splits == 0 && ctas * splits >= wanted) return splits;
    }
    return group_size;
}

/// How the backward pass is cut, as the kernels of one size class want it.
struct BwdPlan {
    AccumulatorLayout dq, dk, dv;
    int block_m = 0;
    int block_n = 0;
    int head_splits = 1;  // CTAs that share the query heads of one K/V head
    int dq_units = 0;     // units (see BwdTileOrder) whose sums of dQ have a place; 0: all
    // Not 0: a unit's tiles zero the sums of the unit that comes so many later, and only those of
    // the first ones are zeroed before.
    int units_ahead = 0;

    BwdWorkspace carve(const AttentionBwdParams& params) const;
};

/// Whether several CTAs add to one entry of dattn_bias.
FAN_HOST_DEVICE bool bias_gradient_is_shared(const AttentionBwdParams& params) {
    const BiasStrides& strides = params.dattn_bias_strides;
    const AttentionProblem& problem = params.problem;
    const bool over_batch = !problem.is_packed() && strides.batch == 0 && problem.batch_size > 1;
    const bool over_heads = strides.head == 0 && problem.num_heads_q > 1;
    return over_batch || over_heads;
}

}  // namespace flash_attn_norm
