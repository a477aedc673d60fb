#pragma once

#include <cstdint>

#include "attention/decode/plan.h"
#include "attention/kv_cache.h"
#include "attention/seqlens.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace decode {

/// Keys [begin, end). In 32 bits, as everything that counts inside a sequence here: see
/// check_sizes(). The first instructions of a CTA are on the way of every call.
struct KeyRange {
    int begin = 0;
    int end = 0;

    FAN_HOST_DEVICE bool empty() const { return begin >= end; }
    FAN_HOST_DEVICE static KeyRange of(const IndexRange& range) {
        return KeyRange{static_cast<int>(range.begin), static_cast<int>(range.end)};
    }
};

/// A row of a sequence's packed rows: packed row r is query row r / group_size of head
/// kv_head * group_size + r % group_size.
struct PackedRow {
    int row = 0;
    int head = 0;
};

/// One CTA's query rows and keys.
struct SplitBlock {
    int batch = 0;  // sequence; batch_size: the packed rows after the last one
    int kv_head = 0;
    int split = 0;
    int group_size = 1;
    int first_row = 0;  // packed, inside the sequence
    int num_rows = 0;   // packed, of the sequence from first_row on
    int seqlen_q = 0;
    int64_t row_q = 0;  // the sequence's first row, counted over all sequences
    int seqlen_k = 0;
    int first_position = 0;  // of key 0 in the cache

    /// Row `tile_row` of the block.
    FAN_HOST_DEVICE PackedRow packed_row(int tile_row) const {
        const uint32_t packed = static_cast<uint32_t>(first_row + tile_row);
        const uint32_t group = static_cast<uint32_t>(group_size);
        const uint32_t row = packed / group;
        return PackedRow{static_cast<int>(row),
                         kv_head * group_size + static_cast<int>(packed - row * group)};
    }
};

/// The first row tile of packed sequence `batch`.
FAN_HOST_DEVICE int first_row_tile(const AttentionProblem& problem, int batch, int group_size,
                                   int block_m) {
    const int64_t row = problem.cu_seqlens_q[batch];
    const int64_t clamped = row < 0 ? 0 : (row > problem.total_q ? problem.total_q : row);
    return static_cast<int>(static_cast<uint32_t>(clamped) * static_cast<uint32_t>(group_size) /
                            static_cast<uint32_t>(block_m)) +
           batch;
}

/// The last packed sequence, or batch_size, whose first row tile is at most `tile`.
FAN_HOST_DEVICE int batch_of_row_tile(const AttentionProblem& problem, int tile, int group_size,
                                      int block_m) {
    int low = 0, high = static_cast<int>(problem.batch_size);
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_row_tile(problem, middle, group_size, block_m) <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/// CTA (index, split) of a grid with K/V heads as the fastest index, then row tiles: CTAs that run
/// together read rows of the cache that lie together, or the same ones. False if it has no rows.
FAN_HOST_DEVICE bool find_block(const KvCacheAttentionParams& params, const SplitPlan& plan,
                                uint32_t index, int split, int block_m, SplitBlock& block) {
    const AttentionProblem& problem = params.problem;
    const uint32_t heads = static_cast<uint32_t>(problem.num_heads_kv);
    const uint32_t tile = index / heads;
    int tile_in_sequence;
    block.split = split;
    block.kv_head = static_cast<int>(index - tile * heads);
    block.group_size = plan.group_size;
    if (problem.is_packed()) {
        block.batch = batch_of_row_tile(problem, static_cast<int>(tile), block.group_size, block_m);
        tile_in_sequence = static_cast<int>(tile) -
                           first_row_tile(problem, block.batch, block.group_size, block_m);
        if (block.batch < problem.batch_size) {
            const RowRange rows = packed_rows(problem.cu_seqlens_q, block.batch, problem.total_q);
            block.row_q = rows.begin;
            block.seqlen_q = static_cast<int>(rows.end - rows.begin);
        } else {
            const int64_t row = problem.cu_seqlens_q[block.batch];
            block.row_q = row < 0 ? 0 : (row > problem.total_q ? problem.total_q : row);
            block.seqlen_q = static_cast<int>(problem.total_q - block.row_q);
        }
    } else {
        const uint32_t tiles = static_cast<uint32_t>(plan.tiles_per_sequence);
        const uint32_t batch = tile / tiles;
        block.batch = static_cast<int>(batch);
        tile_in_sequence = static_cast<int>(tile - batch * tiles);
        block.seqlen_q = static_cast<int>(problem.seqlen_q);
        block.row_q = int64_t{block.batch} * block.seqlen_q;
    }
    block.first_row = tile_in_sequence * block_m;
    block.num_rows = block.seqlen_q * block.group_size - block.first_row;
    if (tile_in_sequence < 0 || block.num_rows <= 0) return false;
    if (block.batch < problem.batch_size && params.cache.num_entries > 0) {
        const IndexRange positions = kv_positions(params.cache, block.batch);
        block.first_position = static_cast<int>(positions.begin);
        block.seqlen_k = static_cast<int>(positions.end - positions.begin);
    }
    return true;
}

/// Tiles of keys [begin, end) of one split: those that a row of the block sees, in equal shares of
/// whole steps of `sets` tiles.
FAN_HOST_DEVICE KeyRange split_tiles(const KeyRange& keys, int tile_keys, int sets, int split,
                                     int num_splits) {
    KeyRange tiles;
    if (keys.empty()) return tiles;
    const int begin = keys.begin / tile_keys;
    const int end = (keys.end + tile_keys - 1) / tile_keys;
    const int steps = (end - begin + sets - 1) / sets;
    const int share = static_cast<int>(static_cast<uint32_t>(steps + num_splits - 1) /
                                       static_cast<uint32_t>(num_splits)) *
                      sets;
    tiles.begin = begin + share * split;
    tiles.end = tiles.begin + share < end ? tiles.begin + share : end;
    if (tiles.end < tiles.begin) tiles.end = tiles.begin;
    return tiles;
}

}  // namespace decode
}  // namespace flash_attn_norm
