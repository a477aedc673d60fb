#pragma once

#include <cstdint>

#include "attention/mask.h"
#include "attention/params.h"
#include "attention/seqlens.h"
#include "attention/sm90/fwd_tile_list.h"
#include "attention/tile_scheduler.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace sm90 {

/// One tile of the forward pass, a block of query rows of one sequence and head, with all that the
/// warpgroups need to know of it. Worked out by one thread, read by all through shared memory.
struct alignas(16) FwdWork {
    int sequence = 0;  // batch_size: the packed rows that no sequence covers
    int head = 0;
    int block = -1;  // of query rows; -1: no tile is left
    int row_q = 0;   // the sequence's first row in q
    int row_k = 0;
    int seqlen_q = 0;
    int seqlen_k = 0;
    int left = 0;       // row i sees keys j with i + left <= j < min(i + right, seqlen_k)
    int right = 0;      // (RowBounds)
    BlockRange blocks;  // of keys

    FAN_HOST_DEVICE bool is_end() const { return block < 0; }
};

/// The order in which a persistent grid works, made on the host. An entry is one head of one batch
/// entry (packed: one head of all sequences); its tiles are its blocks of query rows (packed: those
/// of a list that is made on the device), the last one first. Entries come in sections, within
/// which the blocks descend across all entries: under a causal mask the last block sees the most
/// keys, and the longest tiles of many heads go first. A section is small enough for its keys and
/// values to stay in the L2.
struct FwdTileWalk {
    int entries = 0;
    int blocks = 0;   // of one entry; packed: at most, until load_count()
    int section = 1;  // entries
    int num_heads = 1;
    FwdTileList list;  // packed

    static FwdTileWalk make(const AttentionProblem& problem, int block_m) {
        FwdTileWalk walk;
        const BlockSlots slots = BlockSlots::queries(problem, block_m);
        walk.num_heads = problem.num_heads_q;
        const int64_t batches = problem.is_packed() ? 1 : problem.batch_size;
        walk.entries = static_cast<int>(batches * problem.num_heads_q);
        walk.blocks =
            static_cast<int>(problem.is_packed() ? slots.count() : slots.blocks_per_entry());
        if (problem.window_right >= 0 && problem.window_left < 0) {
            constexpr int64_t kL2Bytes = 16 << 20;
            const int64_t rows = problem.is_packed() ? problem.total_k : problem.seqlen_k;
            const int64_t bytes = rows * (problem.head_dim + problem.head_dim_v) * 2;
            int64_t kv_heads = bytes > 0 ? kL2Bytes / bytes : 1;
            kv_heads = kv_heads < 1 ? 1 : kv_heads > walk.entries ? walk.entries : kv_heads;
            const int64_t section = kv_heads * problem.group_size();
            walk.section = static_cast<int>(section < walk.entries ? section : walk.entries);
        }
        return walk;
    }

    FAN_HOST_DEVICE int64_t count() const { return int64_t{entries} * blocks; }

    /// Takes the number of tiles of a packed call from where the list of them is.
    FAN_HOST_DEVICE void load_count() {
        if (list.count != nullptr) blocks = *list.count;
    }

    /// Sets sequence, head and block of `work`.
    FAN_HOST_DEVICE void find(int index, FwdWork& work) const {
        const unsigned per_section = static_cast<unsigned>(blocks) * section;
        const unsigned first = index / per_section * section;
        const unsigned within = index - first * blocks;
        const unsigned left = entries - first;
        const unsigned width = left < static_cast<unsigned>(section) ? left : section;
        const unsigned turn = within / width;
        const unsigned entry = first + (within - turn * width);
        const int block = blocks - 1 - static_cast<int>(turn);
        if (list.tiles == nullptr) {
            work.sequence = static_cast<int>(entry / num_heads);
            work.head = static_cast<int>(entry) - work.sequence * num_heads;
            work.block = block;
        } else {
            work.head = static_cast<int>(entry);
            const PackedTile tile = list.tiles[block];
            work.sequence = tile.sequence;
            work.block = tile.block;
        }
    }
};

/// Fills the rest of `work`; false when it has no rows. Rows and keys number up to 2^30, so that
/// their sums fit 32 bits.
FAN_HOST_DEVICE bool complete_work(const AttentionProblem& problem, int block_m, int block_n,
                                   FwdWork& work) {
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, work.sequence, /*of_queries=*/true);
    work.row_q = static_cast<int>(info.row_q);
    work.row_k = static_cast<int>(info.row_k);
    work.seqlen_q = static_cast<int>(info.seqlen_q);
    work.seqlen_k = static_cast<int>(info.seqlen_k);
    const int first_row = work.block * block_m;
    if (work.block < 0 || first_row >= work.seqlen_q) return false;
    const RowBounds bounds = RowBounds::make(
        Mask{info.seqlen_q, info.seqlen_k, problem.window_left, problem.window_right});
    work.left = bounds.left;
    work.right = bounds.right;
    // What key_blocks() gives, in 32 bits
    const int last_row =
        (first_row + block_m < work.seqlen_q ? first_row + block_m : work.seqlen_q) - 1;
    const auto clamped = [&](int key) {
        return static_cast<unsigned>(key < 0 ? 0 : key > work.seqlen_k ? work.seqlen_k : key);
    };
    const unsigned begin = clamped(first_row + work.left), end = clamped(last_row + work.right);
    const unsigned size = static_cast<unsigned>(block_n);
    work.blocks = BlockRange{};
    if (begin < end) {
        work.blocks.begin = static_cast<int>(begin / size);
        work.blocks.end = static_cast<int>((end + size - 1) / size);
        work.blocks.full_begin =
            static_cast<int>((clamped(last_row + work.left) + size - 1) / size);
        work.blocks.full_end = static_cast<int>(clamped(first_row + work.right) / size);
    }
    return true;
}

}  // namespace sm90
}  // namespace flash_attn_norm
