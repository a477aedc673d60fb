#pragma once

#include <cstdint>

#include "attention/decode/split_params.h"
#include "attention/kv_cache.h"
#include "attention/seqlens.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace decode {

/// Keys [begin, end).
struct KeyRange {
    int begin = 0;
    int end = 0;

    FAN_HOST_DEVICE bool empty() const { return begin >= end; }
};

/// A Mask in 32 bits: row i sees keys j with i + shift - left <= j <= i + shift + right.
struct KeyBand {
    int shift = 0;  // seqlen_k - seqlen_q
    int seqlen_k = 0;
    int left = -1, right = -1;  // -1: no bound

    FAN_HOST_DEVICE int begin(int row) const {
        const int first = left < 0 ? 0 : row + shift - left;
        return first < 0 ? 0 : (first > seqlen_k ? seqlen_k : first);
    }
    FAN_HOST_DEVICE int end(int row) const {
        const int last = right < 0 ? seqlen_k : row + shift + right + 1;
        return last > seqlen_k ? seqlen_k : (last < 0 ? 0 : last);
    }
};

/// A row of a sequence's packed rows: packed row r is query row r / group_size of head kv_head *
/// group_size + r % group_size.
struct PackedRow {
    int row = 0;
    int head = 0;
};

/// One CTA's query rows and keys.
struct SplitBlock {
    int batch = 0;  // sequence; batch_size: the packed rows after the last one
    int kv_head = 0;
    int first_row = 0;  // packed, inside the sequence
    int num_rows = 0;   // packed, of the sequence from first_row on
    int seqlen_q = 0;
    int64_t row_q = 0;  // the sequence's first row, counted over all sequences
    int seqlen_k = 0;
    int first_position = 0;  // of key 0 in the cache

    /// Row `tile_row` of the block.
    FAN_HOST_DEVICE PackedRow packed_row(const Divisor& group_size, int tile_row) const {
        const int packed = first_row + tile_row, group = static_cast<int>(group_size.value);
        const int row = static_cast<int>(group_size.divide(static_cast<uint32_t>(packed)));
        return PackedRow{row, kv_head * group + packed - row * group};
    }
};

/// The keys of a block's rows.
struct BlockKeys {
    KeyBand band;
    KeyRange seen;       // by some row of the block
    KeyRange full;       // by all of them
    KeyRange positions;  // of those that some row sees, in the cache

    FAN_HOST_DEVICE BlockKeys(const SplitParams& params, const SplitBlock& block, int block_m)
        : band{block.seqlen_k - block.seqlen_q, block.seqlen_k, params.window_left,
               params.window_right} {
        const int count = block.num_rows < block_m ? block.num_rows : block_m;
        const int first = block.packed_row(params.group_size, 0).row;
        const int last = block.packed_row(params.group_size, count - 1).row;
        seen = KeyRange{band.begin(first), band.end(last)};
        full = KeyRange{band.begin(last), band.end(first)};
        positions = KeyRange{seen.begin + block.first_position, seen.end + block.first_position};
    }
};

/// The first row tile of packed sequence `batch`.
FAN_HOST_DEVICE int first_row_tile(const SplitParams& params, int batch, int block_m) {
    const int64_t row = params.cu_seqlens_q[batch];
    const int64_t clamped = row < 0 ? 0 : (row > params.total_q ? params.total_q : row);
    return static_cast<int>(static_cast<uint32_t>(clamped) * params.group_size.value /
                            static_cast<uint32_t>(block_m)) +
           batch;
}

/// The last packed sequence, or batch_size, whose first row tile is at most `tile`.
FAN_HOST_DEVICE int batch_of_row_tile(const SplitParams& params, int tile, int block_m) {
    int low = 0, high = params.batch_size;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_row_tile(params, middle, block_m) <= tile) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/// CTA `index` of a grid with K/V heads as the fastest index, then row tiles: CTAs that run
/// together read rows of the cache that lie together, or the same ones. False if it has no rows.
FAN_HOST_DEVICE bool find_block(const SplitParams& params, uint32_t index, int block_m,
                                SplitBlock& block) {
    const uint32_t tile = params.num_heads_kv.divide(index);
    int tile_in_sequence;
    block.kv_head = static_cast<int>(index - tile * params.num_heads_kv.value);
    if (params.is_packed()) {
        if (params.most_rows > 0) {
            block.batch = static_cast<int>(tile);
            tile_in_sequence = 0;
        } else {
            block.batch = batch_of_row_tile(params, static_cast<int>(tile), block_m);
            tile_in_sequence =
                static_cast<int>(tile) - first_row_tile(params, block.batch, block_m);
        }
        RowRange rows;
        if (block.batch < params.batch_size) {
            rows = packed_rows(params.cu_seqlens_q, block.batch, params.total_q);
        } else {
            const int64_t row = params.cu_seqlens_q[block.batch];
            rows.begin = row < 0 ? 0 : (row > params.total_q ? params.total_q : row);
            rows.end = params.total_q;
        }
        block.row_q = rows.begin;
        block.seqlen_q = static_cast<int>(rows.end - rows.begin);
    } else {
        const uint32_t batch = params.tiles_per_sequence.divide(tile);
        block.batch = static_cast<int>(batch);
        tile_in_sequence = static_cast<int>(tile - batch * params.tiles_per_sequence.value);
        block.seqlen_q = params.seqlen_q;
        block.row_q = int64_t{block.batch} * block.seqlen_q;
    }
    block.first_row = tile_in_sequence * block_m;
    block.num_rows = block.seqlen_q * static_cast<int>(params.group_size.value) - block.first_row;
    if (tile_in_sequence < 0 || block.num_rows <= 0) return false;
    if (params.most_rows > 0 && block.seqlen_q > params.most_rows) return false;
    if (block.batch < params.batch_size && params.cache.num_entries > 0) {
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
    tiles.begin = keys.begin / tile_keys;
    tiles.end = (keys.end + tile_keys - 1) / tile_keys;
    if (num_splits == 1) return tiles;
    const int end = tiles.end;
    const uint32_t steps =
        static_cast<uint32_t>(end - tiles.begin + sets - 1) / static_cast<uint32_t>(sets);
    const uint32_t count = static_cast<uint32_t>(num_splits);
    const int share = static_cast<int>((steps + count - 1) / count) * sets;
    tiles.begin += share * split;
    if (tiles.begin > end) tiles.begin = end;
    if (end - tiles.begin > share) tiles.end = tiles.begin + share;
    return tiles;
}

}  // namespace decode
}  // namespace flash_attn_norm
