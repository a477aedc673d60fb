#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/params.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace decode {

/// Divides numbers below 2^31 by a fixed number without a division: Granlund and Montgomery,
/// "Division by Invariant Integers using Multiplication", figure 4.1.
struct Divisor {
    uint32_t value = 1;
    uint32_t multiplier = 1;
    uint32_t shift = 0;

    static Divisor of(int64_t value) {
        Divisor divisor;
        divisor.value = static_cast<uint32_t>(value);
        while ((uint64_t{1} << divisor.shift) < divisor.value) ++divisor.shift;
        const uint64_t excess = (uint64_t{1} << divisor.shift) - divisor.value;
        divisor.multiplier = static_cast<uint32_t>((excess << 32) / divisor.value + 1);
        return divisor;
    }

    FAN_HOST_DEVICE uint32_t divide(uint32_t number) const {
        const uint32_t high =
            static_cast<uint32_t>((static_cast<uint64_t>(number) * multiplier) >> 32);
        return (high + number) >> shift;
    }
};

/// A split kernel and the card that it runs on.
struct SplitShape {
    int block_m = 16;    // packed query rows of a CTA
    int tile_keys = 16;  // keys that a set of warps takes at a time
    int sets = 4;        // of a CTA
    int more_sets = 4;   // where one CTA on a multiprocessor is enough; equal: never
    int num_sms = 1;
    int ctas_per_sm = 1;  // with `sets` sets
    int max_cluster = 1;  // splits that can add up their shares themselves, as a cluster
    int key_bytes = 0;    // read for a key; 0: those of its row of keys and of values
};

/// How a call is cut into CTAs, and its workspace. It depends on shapes alone, so that a captured
/// call may be replayed with other lengths.
struct SplitPlan {
    int64_t row_tiles = 0;  // of all sequences; packed: slots for them, some of which stay unused
    int64_t tiles_per_sequence = 0;  // dense
    int sets = 4;
    int num_splits = 1;
    bool in_cluster = false;  // the CTAs of a row tile's splits, which then add up their shares
    int64_t total_rows = 0;   // batch_size * seqlen_q * num_heads_q, or total_q * num_heads_q

    int64_t workspace_bytes(int head_dim_v) const {
        return num_splits > 1 && !in_cluster
                   ? (int64_t{head_dim_v} + 1) * num_splits * total_rows * 4
                   : 0;
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

/// The same of a call that may leave sequences out.
inline int64_t packed_rows_per_sequence(const KvCacheAttentionParams& params) {
    return params.most_rows > 0 ? params.most_rows * params.problem.group_size()
                                : packed_rows_per_sequence(params.problem);
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

/// What a card with full multiprocessors delivers and a CTA takes: measured on an H200 with the
/// smaller and the larger number of sets (docs/decode.md). Times in microseconds.
constexpr double kSmRate = 34e3;        // bytes per microsecond and multiprocessor
constexpr double kCtaRate = 45e3;       // of one CTA at most
constexpr double kLargeCtaRate = 60e3;  // with more sets
constexpr double kStart = 4.0;          // of a wave: lengths, the first tiles, the output
constexpr double kCombine = 2.5;        // once there are splits
constexpr double kCombineSplit = 0.03;  // for each of them
constexpr double kClusterCombine = 1.0;

/// CTAs that run at the same time, and how fast.
struct SplitSlots {
    int64_t count = 1;
    int max_cluster = 1;
    bool only_clusters = false;  // no splits that leave their parts in a workspace
    double card_rate = kSmRate;
    double partial_bytes = 0.0;  // of a split, written and read
    double cta_rate = kCtaRate;
};

/// Whether the CTAs of the splits of each of `tiles` row tiles are to be a cluster. Its CTAs start
/// together and near each other: on an H200 64 of 132 multiprocessors were filled by clusters of 8
/// in one wave, 128 were not.
inline bool fits_cluster(int64_t tiles, int splits, const SplitSlots& slots) {
    return splits > 1 && splits <= slots.max_cluster && 4 * tiles * splits <= 3 * slots.count;
}

/// The time that `ctas` CTAs take that read `bytes` each: all together as fast as the card
/// delivers, but none faster than it can alone.
inline double split_time(int64_t ctas, double bytes, const SplitSlots& slots) {
    const auto wave = [&](int64_t count) {
        const double together = static_cast<double>(count) * bytes / slots.card_rate;
        return kStart + std::max(together, bytes / slots.cta_rate);
    };
    const int64_t rest = ctas % slots.count;
    return static_cast<double>(ctas / slots.count) * wave(slots.count) +
           (rest > 0 ? wave(rest) : 0.0);
}

/// The number of splits with the shortest expected time, for `tiles` row tiles of `keys` keys each
/// of which a CTA takes step_keys at a time.
inline int choose_num_splits(int64_t tiles, int64_t keys, double key_bytes, int64_t step_keys,
                             const SplitSlots& slots) {
    const int64_t steps = std::max<int64_t>((keys + step_keys - 1) / step_keys, 1);
    int best = 1;
    double best_time = 0.0;
    for (int splits = 1; splits <= std::min<int64_t>(steps, kMaxSplits); ++splits) {
        if (slots.only_clusters && splits > 1 && !fits_cluster(tiles, splits, slots)) break;
        const int64_t share = (steps + splits - 1) / splits * step_keys;
        const double bytes = static_cast<double>(share) * key_bytes;
        double time = split_time(tiles * splits, bytes, slots);
        if (splits > 1) {
            time += fits_cluster(tiles, splits, slots)
                        ? kClusterCombine
                        : kCombine + kCombineSplit * splits +
                              splits * slots.partial_bytes / slots.card_rate;
        }
        if (splits == 1 || time < best_time) {
            best = splits;
            best_time = time;
        }
    }
    return best;
}

inline SplitPlan plan_splits(const KvCacheAttentionParams& params, const SplitShape& shape) {
    const AttentionProblem& problem = params.problem;
    const int64_t group = problem.group_size();
    const auto tiles_of = [&](int64_t rows) {
        return (rows * group + shape.block_m - 1) / shape.block_m;
    };
    SplitPlan plan;
    int64_t used_tiles;          // those that packed sequences of equal length would fill
    if (params.most_rows > 0) {  // one for each sequence, which may stay unused
        plan.total_rows = problem.total_q * problem.num_heads_q;
        plan.row_tiles = used_tiles = problem.batch_size;
    } else if (problem.is_packed()) {
        plan.total_rows = problem.total_q * problem.num_heads_q;
        plan.row_tiles = problem.total_q == 0
                             ? 0
                             : problem.total_q * group / shape.block_m + problem.batch_size + 1;
        used_tiles = std::max(problem.batch_size, tiles_of(problem.total_q));
    } else {
        plan.total_rows = problem.batch_size * problem.seqlen_q * problem.num_heads_q;
        plan.tiles_per_sequence = tiles_of(problem.seqlen_q);
        plan.row_tiles = problem.batch_size * plan.tiles_per_sequence;
        used_tiles = plan.row_tiles;
    }
    const int64_t keys = max_visible_keys(params);
    const int64_t tiles = used_tiles * problem.num_heads_kv;
    const double key_bytes = shape.key_bytes > 0 ? shape.key_bytes
                                                 : (params.cache.is_float8 ? 1.0 : 2.0) *
                                                       (problem.head_dim + problem.head_dim_v);
    const bool one_each = shape.more_sets > shape.sets && tiles <= shape.num_sms;
    plan.sets = one_each ? shape.more_sets : shape.sets;
    const int64_t step_keys = int64_t{shape.tile_keys} * plan.sets;
    SplitSlots slots;
    slots.count = int64_t{shape.num_sms} * (one_each ? 1 : shape.ctas_per_sm);
    slots.max_cluster = shape.max_cluster;
    slots.only_clusters = params.most_rows > 0;
    slots.card_rate = kSmRate * shape.num_sms;
    slots.cta_rate = one_each ? kLargeCtaRate : kCtaRate;
    slots.partial_bytes = 8.0 * static_cast<double>(plan.total_rows) * problem.head_dim_v;
    if (params.num_splits > 0) {
        const int64_t steps = std::max<int64_t>((keys + step_keys - 1) / step_keys, 1);
        const int64_t most = std::min<int64_t>(steps, kMaxSplits);
        plan.num_splits = static_cast<int>(std::min<int64_t>(params.num_splits, most));
    } else {
        plan.num_splits = choose_num_splits(tiles, keys, key_bytes, step_keys, slots);
    }
    plan.in_cluster = fits_cluster(tiles, plan.num_splits, slots);
    if (slots.only_clusters && !plan.in_cluster) plan.num_splits = 1;
    return plan;
}

}  // namespace decode
}  // namespace flash_attn_norm
