#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/params.h"

namespace flash_attn_norm {
namespace decode {

/// What the plan needs to know of a kernel and of the card it runs on.
struct SplitShape {
    int block_m = 16;        // packed query rows of a CTA
    int keys_per_step = 64;  // that a CTA takes at a time
    int num_sms = 1;
    int ctas_per_sm = 1;
};

/// How a call is cut into CTAs, and its workspace. It depends on shapes alone, so that a captured
/// call may be replayed with other lengths.
struct SplitPlan {
    int64_t row_tiles = 0;  // of all sequences; packed: slots for them, some of which stay unused
    int64_t tiles_per_sequence = 0;  // dense
    int group_size = 1;
    int num_splits = 1;
    int64_t total_rows = 0;        // batch_size * seqlen_q * num_heads_q, or total_q * num_heads_q
    float* partial_out = nullptr;  // [num_splits, total_rows, head_dim_v]; null: one split
    float* partial_lse = nullptr;  // [num_splits, total_rows], base 2, -inf without a key

    int64_t workspace_bytes(int head_dim_v) const {
        return num_splits > 1 ? (int64_t{head_dim_v} + 1) * num_splits * total_rows * 4 : 0;
    }
};

constexpr int kMaxSplits = 128;

/// Query rows of a sequence with those of all heads of a group below each other: the most that a
/// dense call has, the mean of a packed one.
inline int64_t packed_rows_per_sequence(const AttentionProblem& problem) {
    const int64_t batch_size = std::max<int64_t>(problem.batch_size, 1);
    const int64_t rows =
        problem.is_packed() ? (problem.total_q + batch_size - 1) / batch_size : problem.seqlen_q;
    return rows * problem.group_size();
}

/// Keys that a sequence has at most, and that its rows see at most through a window.
inline int64_t max_visible_keys(const KvCacheAttentionParams& params) {
    const AttentionProblem& problem = params.problem;
    const int64_t capacity = params.cache.capacity();
    if (problem.is_packed() || problem.window_left < 0 || problem.window_right < 0) return capacity;
    const int64_t limit = capacity + problem.seqlen_q;  // no sum below passes it by much
    return std::min(capacity, std::min(problem.window_left, limit) +
                                  std::min(problem.window_right, limit) + problem.seqlen_q);
}

/// Microseconds that `ctas` CTAs of `steps` steps take, by a model of the memory: when all are at
/// work, bytes arrive at the rate of the card; few CTAs wait for their own latency.
inline double split_time(int64_t ctas, int64_t steps, double step_bytes, const SplitShape& shape) {
    constexpr double kBytesPerMicrosecondAndSm = 34e3;
    constexpr double kStepLatency = 0.6;
    constexpr double kStart = 1.5;  // of a CTA: lengths, Q, the first tiles
    const int64_t slots = int64_t{shape.num_sms} * shape.ctas_per_sm;
    const double full_step = step_bytes * shape.ctas_per_sm / kBytesPerMicrosecondAndSm;
    const int64_t waves = ctas / slots, rest = ctas % slots;
    double time = static_cast<double>(waves * steps) * std::max(full_step, kStepLatency);
    if (rest > 0) {
        const double share = static_cast<double>(rest) / static_cast<double>(slots);
        time += static_cast<double>(steps) * std::max(full_step * share, kStepLatency);
    }
    return time + kStart * static_cast<double>(waves + (rest > 0 ? 1 : 0));
}

/// The number of splits with the shortest expected time.
inline int choose_num_splits(int64_t tiles, int64_t keys, double key_bytes,
                             const SplitShape& shape) {
    constexpr double kCombine = 2.5;         // microseconds, once there are splits
    constexpr double kCombineSplit = 0.015;  // for each of them
    const int64_t steps = (keys + shape.keys_per_step - 1) / shape.keys_per_step;
    const double step_bytes = key_bytes * shape.keys_per_step;
    int best = 1;
    double best_time = split_time(tiles, steps, step_bytes, shape);
    for (int splits = 2; splits <= std::min<int64_t>(steps, kMaxSplits); ++splits) {
        const double time =
            split_time(tiles * splits, (steps + splits - 1) / splits, step_bytes, shape) +
            kCombine + kCombineSplit * splits;
        if (time < best_time) {
            best = splits;
            best_time = time;
        }
    }
    return best;
}

inline SplitPlan plan_splits(const KvCacheAttentionParams& params, const SplitShape& shape) {
    const AttentionProblem& problem = params.problem;
    const int64_t group = problem.group_size();
    SplitPlan plan;
    plan.group_size = problem.group_size();
    int64_t used_tiles;  // those that packed sequences of equal length would fill
    if (problem.is_packed()) {
        plan.total_rows = problem.total_q * problem.num_heads_q;
        plan.row_tiles = problem.total_q == 0
                             ? 0
                             : problem.total_q * group / shape.block_m + problem.batch_size + 1;
        used_tiles = std::max(problem.batch_size,
                              (problem.total_q * group + shape.block_m - 1) / shape.block_m);
    } else {
        plan.total_rows = problem.batch_size * problem.seqlen_q * problem.num_heads_q;
        plan.tiles_per_sequence = (problem.seqlen_q * group + shape.block_m - 1) / shape.block_m;
        plan.row_tiles = problem.batch_size * plan.tiles_per_sequence;
        used_tiles = plan.row_tiles;
    }
    const int64_t keys = max_visible_keys(params);
    if (params.num_splits > 0) {
        const int64_t steps = (keys + shape.keys_per_step - 1) / shape.keys_per_step;
        const int64_t most = std::min<int64_t>(std::max<int64_t>(steps, 1), kMaxSplits);
        plan.num_splits = static_cast<int>(std::min<int64_t>(params.num_splits, most));
    } else {
        const double key_bytes = 2.0 * (problem.head_dim + problem.head_dim_v);
        plan.num_splits =
            choose_num_splits(used_tiles * problem.num_heads_kv, keys, key_bytes, shape);
    }
    if (plan.num_splits > 1 && params.workspace != nullptr) {
        plan.partial_out = static_cast<float*>(params.workspace);
        plan.partial_lse =
            plan.partial_out + plan.num_splits * plan.total_rows * problem.head_dim_v;
    }
    return plan;
}

}  // namespace decode
}  // namespace flash_attn_norm
