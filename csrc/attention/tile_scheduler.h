#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/seqlens.h"
#include "common/host_device.h"

namespace flash_attn_norm {

/// Cuts the rows of a dense or packed tensor into blocks, one slot each. A grid has one CTA per
/// slot, and workspaces that need padded rows have kBlock of them per slot. The number of slots
/// depends on shapes alone: the lengths of packed sequences stay on the device, so a packed tensor
/// gets total / block + batch_size + 1 slots, enough for any lengths, and some stay unused.
struct BlockSlots {
    const int32_t* cu_seqlens = nullptr;  // null: dense
    int64_t batch_size = 0;
    int64_t seqlen = 0;  // dense
    int64_t total = 0;   // packed
    int block = 1;       // rows of a block

    FAN_HOST_DEVICE static BlockSlots queries(const AttentionProblem& problem, int block) {
        return BlockSlots{problem.cu_seqlens_q, problem.batch_size, problem.seqlen_q,
                          problem.total_q, block};
    }
    FAN_HOST_DEVICE static BlockSlots keys(const AttentionProblem& problem, int block) {
        return BlockSlots{problem.cu_seqlens_k, problem.batch_size, problem.seqlen_k,
                          problem.total_k, block};
    }

    FAN_HOST_DEVICE int64_t blocks_per_entry() const { return (seqlen + block - 1) / block; }

    FAN_HOST_DEVICE int64_t count() const {
        if (cu_seqlens == nullptr) return batch_size * blocks_per_entry();
        return total == 0 ? 0 : total / block + batch_size + 1;
    }

    /// The slot of block 0 of sequence `batch`; the others follow. Sequence batch_size is the rows
    /// that no sequence covers.
    FAN_HOST_DEVICE int64_t first_slot(int64_t batch) const {
        if (cu_seqlens == nullptr) return batch * blocks_per_entry();
        const int64_t row = cu_seqlens[batch];
        const int64_t clamped = row < 0 ? 0 : (row > total ? total : row);
        return clamped / block + batch;
    }

    /// The last sequence whose first slot is at most `slot`.
    FAN_HOST_DEVICE int64_t batch_of(int64_t slot) const {
        if (cu_seqlens == nullptr) return slot / blocks_per_entry();
        int64_t low = 0, high = batch_size;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (first_slot(middle) <= slot) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
};

/// seqlen_info() of sequence `batch`, which may be batch_size: the packed rows after the last
/// sequence, queries that see no key and keys that no query sees.
FAN_HOST_DEVICE SeqlenInfo seqlen_info_or_uncovered(const AttentionProblem& problem, int64_t batch,
                                                    bool of_queries) {
    if (batch < problem.batch_size) return seqlen_info(problem, batch);
    const int64_t total = of_queries ? problem.total_q : problem.total_k;
    const int32_t* cu_seqlens = of_queries ? problem.cu_seqlens_q : problem.cu_seqlens_k;
    const int64_t row = cu_seqlens[batch];
    const int64_t begin = row < 0 ? 0 : (row > total ? total : row);
    SeqlenInfo info;
    info.batch = 0;
    info.row_q = of_queries ? begin : 0;
    info.row_k = of_queries ? 0 : begin;
    info.seqlen_q = of_queries ? total - begin : 0;
    info.seqlen_k = of_queries ? 0 : total - begin;
    return info;
}

/// Blocks [begin, end) of one operand that a block of the other meets; those in [full_begin,
/// full_end) need no mask.
struct BlockRange {
    int begin = 0;
    int end = 0;
    int full_begin = 0;
    int full_end = 0;

    FAN_HOST_DEVICE bool masked(int block) const { return block < full_begin || block >= full_end; }
};

/// Key blocks that the query rows [row_begin, row_end) see.
FAN_HOST_DEVICE BlockRange key_blocks(const Mask& mask, int64_t row_begin, int64_t row_end,
                                      int block) {
    const IndexRange keys = mask.keys(row_begin, row_end);
    BlockRange range;
    if (keys.empty() || row_begin >= row_end) return range;
    range.begin = static_cast<int>(keys.begin / block);
    range.end = static_cast<int>((keys.end + block - 1) / block);
    // Keys that all of the rows see: the first row's last one bounds them on the right, the last
    // row's first one on the left.
    const int64_t right = mask.keys_of_row(row_begin).end;
    const int64_t left = mask.keys_of_row(row_end - 1).begin;
    range.full_begin = static_cast<int>((left + block - 1) / block);
    range.full_end = static_cast<int>(right / block);
    return range;
}

/// Query blocks that see at least one of the keys [key_begin, key_end).
FAN_HOST_DEVICE BlockRange query_blocks(const Mask& mask, int64_t key_begin, int64_t key_end,
                                        int block) {
    const IndexRange rows = mask.rows(key_begin, key_end);
    BlockRange range;
    if (rows.empty() || key_begin >= key_end) return range;
    range.begin = static_cast<int>(rows.begin / block);
    range.end = static_cast<int>((rows.end + block - 1) / block);
    // Rows that see all of the keys: those that see the last one from the right bound on, and the
    // first one up to the left bound.
    const int64_t first = mask.rows(key_end - 1, key_end).begin;
    const int64_t last = mask.rows(key_begin, key_begin + 1).end;
    range.full_begin = static_cast<int>((first + block - 1) / block);
    range.full_end = static_cast<int>(last / block);
    return range;
}

}  // namespace flash_attn_norm
