#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/params.h"
#include "attention/tile_scheduler.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace sm90 {

/// Division by a number that the host knows, of dividends from 0 to 2^31 - 1: a product and a
/// shift. With p = 31 + ceil(log2(divisor)) the quotient is dividend * ceil(2^p / divisor) / 2^p,
/// for the excess of the factor is below 2^(p - 31) (Granlund and Montgomery 1994).
struct Divisor {
    uint32_t divisor = 1;
    uint32_t factor = 0;
    int shift = 0;

    static Divisor of(int divisor) {
        Divisor result;
        result.divisor = static_cast<uint32_t>(divisor > 0 ? divisor : 1);
        int bits = 0;
        while ((uint64_t{1} << bits) < result.divisor) ++bits;
        if (bits == 0) return result;
        const uint64_t power = uint64_t{1} << (31 + bits);
        result.factor = static_cast<uint32_t>((power + result.divisor - 1) / result.divisor);
        result.shift = 31 + bits;
        return result;
    }
    FAN_HOST_DEVICE int quotient(int dividend) const {
        if (shift == 0) return dividend;
        return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * factor >>
                                shift);
    }
};

/// The order in which CTAs take the tiles of the backward pass. A tile is a block of keys of one
/// unit: a K/V head (or a part of its group) of one sequence, or of all packed ones.
///
/// Units come one after the other, so that those who share queries run at the same time. Under a
/// causal mask a unit's first block is the longest, and one that starts last would run alone: the
/// last `tail_units` units take turns instead, all their first blocks before all their second ones.
struct BwdTileOrder {
    int units = 0;
    int blocks = 0;  // of a unit
    int tail_units = 0;
    Divisor by_blocks, by_tail_units;  // see finish()

    void finish() {
        by_blocks = Divisor::of(blocks);
        by_tail_units = Divisor::of(tail_units);
    }

    struct Tile {
        int unit = 0;
        int block = 0;
    };

    /// Units of which tiles may be at work at a time. Those that take turns count as one: a unit
    /// waits for units so much earlier, and none of its tiles for a later one.
    int at_work(int slots) const { return tail_units + slots / std::max(1, blocks) + 2; }

    /// Places for sums of dQ, which units take in turns: for those at work at a time, and for as
    /// many as are rounded meanwhile.
    int places(int slots) const {
        return std::min(units, at_work(slots) + std::max(2, at_work(slots) / 2));
    }

    FAN_HOST_DEVICE Tile tile(int index) const {
        const int head_units = units - tail_units;
        const int in_tail = index - head_units * blocks;
        if (in_tail < 0) {
            const int unit = by_blocks.quotient(index);
            return Tile{unit, index - unit * blocks};
        }
        const int block = by_tail_units.quotient(in_tail);
        return Tile{head_units + in_tail - block * tail_units, block};
    }
};

/// Units that take turns at the end of a causal problem: together they last a little longer than
/// one longest tile. `slots`: tiles that run at a time. unit_bytes: queries, gradients and sums of
/// a unit, which should stay in the L2 cache for all of them.
inline int tail_units(int units, int blocks, int slots, int group_size, int64_t unit_bytes) {
    constexpr int64_t kCacheBytes = 40 << 20;
    const double factor = group_size > 1 ? 1.8 : 2.4;
    const int wanted = static_cast<int>(factor * slots / (blocks + 1) + 0.5);
    const int64_t cached = std::max<int64_t>(1, kCacheBytes / std::max<int64_t>(1, unit_bytes));
    return std::min(units, std::max(1, static_cast<int>(std::min<int64_t>(wanted, cached))));
}

/// The order for this problem. Blocks have block_n keys; `slots` as above.
inline BwdTileOrder bwd_tile_order(const AttentionProblem& problem, int head_splits, int block_n,
                                   int slots) {
    const int64_t heads = int64_t{problem.num_heads_kv} * head_splits;
    BwdTileOrder order;
    if (problem.is_packed()) {
        order.units = static_cast<int>(heads);
        order.blocks = static_cast<int>(BlockSlots::keys(problem, block_n).count());
        order.finish();
        return order;
    }
    order.units = static_cast<int>(problem.batch_size * heads);
    order.blocks = static_cast<int>(BlockSlots::keys(problem, block_n).blocks_per_entry());
    if (problem.window_right >= 0 && problem.window_left < 0) {
        const int group_size = problem.group_size() / head_splits;
        const int64_t row_bytes = int64_t{8} * problem.head_dim;  // q, dout: 2 each, sums: 4
        order.tail_units =
            tail_units(order.units, order.blocks, slots, group_size, problem.seqlen_q * row_bytes);
    }
    order.finish();
    return order;
}

}  // namespace sm90
}  // namespace flash_attn_norm
