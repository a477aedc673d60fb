#pragma once

#include <cstdint>

#include "attention/cpu/tile_engine.h"
#include "attention/cpu/work_items.h"
#include "attention/delta_correction.h"
#include "attention/params.h"
#include "common/cpu_runtime.h"

/// How the backward pass is cut up, and the memory it works in.
namespace flash_attn_norm {
namespace cpu {

/// What stays the same for the whole call.
struct BwdPlan {
    const AttentionBwdParams& params;
    const AttentionProblem& problem;
    const TileEngine& engine;
    int block_m, block_n;
    int head_dim, head_dim_v;  // padded to kPanel
    bool in_two_parts;         // P and dS: see delta_correction.h and OperandPart
    MaxSeqlens longest;
    int64_t rows, keys;  // the longest sequence's, in whole blocks
    int64_t num_units;   // (sequence, KV head)
    int64_t num_splits;  // of a unit's keys
    int64_t split_keys;

    BwdPlan(const AttentionBwdParams& bwd_params, const CpuRuntime& runtime)
        : params(bwd_params),
          problem(bwd_params.problem),
          engine(select_engine(problem.dtype)),
          block_m(engine.bwd_block_m),
          block_n(engine.bwd_block_n),
          head_dim(static_cast<int>(round_up(problem.head_dim, kPanel))),
          head_dim_v(static_cast<int>(round_up(problem.head_dim_v, kPanel))),
          in_two_parts(has_few_keys(problem) && engine.operand_bytes == 2),
          longest(max_seqlens(problem)) {
        rows = round_up(max_of(longest.q, 1), block_m);
        keys = round_up(max_of(longest.k, 1), block_n);
        num_units = problem.batch_size * problem.num_heads_kv;
        // Whole units need no sum over splits, so a unit is split only for want of work.
        constexpr int64_t kItemsPerThread = 4;
        const int64_t wanted = kItemsPerThread * runtime.num_threads;
        const bool is_even = !problem.is_packed() && num_units % runtime.num_threads == 0;
        int64_t count = 1;
        if (num_units > 0 && num_units < wanted && !is_even) {
            count = min_of((wanted + num_units - 1) / num_units, keys / block_n);
        }
        split_keys = round_up((keys + count - 1) / count, block_n);
        num_splits = (keys + split_keys - 1) / split_keys;
    }

    /// Partial dq of one head of one split.
    int64_t partial_dq_elements() const { return num_splits > 1 ? rows * head_dim : 0; }
};

/// What workers share: the partial dq [units, group_size, splits, rows, head_dim], the sink's
/// gradient per sequence and head, and corrected deltas.
struct BwdShared {
    float* partial_dq = nullptr;
    double* ds_aux = nullptr;      // [batch_size, num_heads_q]
    float* exact_delta = nullptr;  // like softmax_lse or null, see exact_delta()

    BwdShared(Arena& arena, const BwdPlan& plan) {
        partial_dq = arena.take<float>(plan.num_units * plan.problem.group_size() *
                                       plan.num_splits * plan.partial_dq_elements());
        ds_aux = arena.take<double>(plan.problem.batch_size * plan.problem.num_heads_q);
        if (needs_delta_correction(plan.params)) {
            exact_delta = arena.take<float>(plan.problem.total_q * plan.problem.num_heads_q);
        }
    }
};

/// One worker's tiles. "Per block" means one block after the other, each contiguous.
struct BwdScratch {
    // Of the split's keys, per block.
    char* k;      // B form of [block_n, head_dim]
    char* k_t;    // B form of [head_dim, block_n]
    char* v_t;    // B form of [head_dim_v, block_n]
    float* dk_t;  // [head_dim, block_n]
    float* dv_t;  // [head_dim_v, block_n]
    // Of one query head, per block.
    char* q;       // [block_m, head_dim]
    char* q_t;     // [head_dim, block_m]
    char* dout;    // [block_m, head_dim_v]
    char* dout_t;  // [head_dim_v, block_m]
    float* dq;     // [block_m, head_dim]
    float *lse_log2, *delta;
    // Of one tile.
    float *scores, *dprobs;        // [block_m, block_n]
    float *keep, *softcap_factor;  // likewise, where needed
    char *probs_b, *dscores_b;     // B form of [block_m, block_n]
    char* dscores_a;               // [block_m, block_n]

    BwdScratch(Arena& arena, const BwdPlan& plan) {
        const TileEngine& engine = plan.engine;
        const int64_t tile = int64_t{plan.block_m} * plan.block_n;
        k = arena.take_operands(plan.split_keys * plan.head_dim, engine);
        k_t = arena.take_operands(plan.split_keys * plan.head_dim, engine);
        v_t = arena.take_operands(plan.split_keys * plan.head_dim_v, engine);
        dk_t = arena.take<float>(plan.split_keys * plan.head_dim);
        dv_t = arena.take<float>(plan.split_keys * plan.head_dim_v);
        q = arena.take_operands(plan.rows * plan.head_dim, engine);
        q_t = arena.take_operands(plan.rows * plan.head_dim, engine);
        dout = arena.take_operands(plan.rows * plan.head_dim_v, engine);
        dout_t = arena.take_operands(plan.rows * plan.head_dim_v, engine);
        dq = arena.take<float>(plan.rows * plan.head_dim);
        lse_log2 = arena.take<float>(plan.rows);
        delta = arena.take<float>(plan.rows);
        scores = arena.take<float>(tile);
        dprobs = arena.take<float>(tile);
        keep = plan.problem.dropout_p > 0.0f ? arena.take<float>(tile) : nullptr;
        softcap_factor = plan.problem.softcap > 0.0f ? arena.take<float>(tile) : nullptr;
        probs_b = arena.take_operands(tile, engine);
        dscores_b = arena.take_operands(tile, engine);
        dscores_a = arena.take_operands(tile, engine);
    }
};

}  // namespace cpu
}  // namespace flash_attn_norm
