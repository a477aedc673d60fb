#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/seqlens.h"
#include "attention/tile_scheduler.h"
#include "common/host_device.h"

namespace flash_attn_norm {
namespace sm90 {

/// Short sequences, of at most so many keys, are worked on by kernels whose tiles have kShortRows
/// query rows and of which a multiprocessor runs several CTAs.
constexpr int kShortRows = 64;
constexpr int kShortKeys = 256;

/// One tile of a packed tensor, of every head.
struct alignas(8) PackedTile {
    int sequence;  // batch_size: the packed rows that no sequence covers
    int block;     // of query rows
};

/// So few tiles of so few sequences are listed by one warp of every CTA, in shared memory: a launch
/// for it would take longer.
constexpr int kFewTiles = 64;
constexpr int kFewSequences = 31;  // a lane each, and one for the rows that no sequence covers

/// Tiles in device memory. How many there are depends on the lengths, which the host does not know.
struct FwdTileList {
    const PackedTile* tiles = nullptr;
    const int* count = nullptr;
};

/// The lists of a packed call and the counter from which tiles are claimed, in its workspace.
struct FwdTileLists {
    int* counter = nullptr;
    int* counts = nullptr;  // of both lists
    PackedTile* long_tiles = nullptr;
    PackedTile* short_tiles = nullptr;
    int capacity = 0;        // of each list
    int block_m = 1;         // query rows of a long tile
    int short_rows = 0;      // up to which a sequence is in the list of short ones; 0: none is
    int64_t least_rows = 0;  // of a sequence in a list

    static constexpr int kHeaderBytes = 64;

    static int64_t capacity_of(const AttentionProblem& problem) {
        return problem.is_packed() ? BlockSlots::queries(problem, kShortRows).count() : 0;
    }
    static int64_t workspace_bytes(const AttentionProblem& problem) {
        return kHeaderBytes + 2 * capacity_of(problem) * int64_t{sizeof(PackedTile)};
    }
    static FwdTileLists carve(const AttentionProblem& problem, void* workspace) {
        FwdTileLists lists;
        lists.counter = static_cast<int*>(workspace);
        lists.counts = lists.counter + 1;
        lists.capacity = static_cast<int>(capacity_of(problem));
        lists.long_tiles =
            reinterpret_cast<PackedTile*>(static_cast<char*>(workspace) + kHeaderBytes);
        lists.short_tiles = lists.long_tiles + lists.capacity;
        return lists;
    }

    FwdTileList long_list() const { return FwdTileList{long_tiles, counts}; }
    FwdTileList short_list() const { return FwdTileList{short_tiles, counts + 1}; }
};

/// How many tiles of which list a sequence has; it is in one of them at most.
struct TileCounts {
    int in_long = 0;
    int in_short = 0;
};

FAN_HOST_DEVICE TileCounts tile_counts(const AttentionProblem& problem, int64_t sequence,
                                       int block_m, int short_rows, int64_t least_rows) {
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, sequence, /*of_queries=*/true);
    TileCounts counts;
    if (info.seqlen_q < least_rows && sequence < problem.batch_size) return counts;
    if (info.seqlen_q <= short_rows && info.seqlen_k <= kShortKeys) {
        counts.in_short = static_cast<int>((info.seqlen_q + kShortRows - 1) / kShortRows);
    } else {
        counts.in_long = static_cast<int>((info.seqlen_q + block_m - 1) / block_m);
    }
    return counts;
}

}  // namespace sm90
}  // namespace flash_attn_norm
