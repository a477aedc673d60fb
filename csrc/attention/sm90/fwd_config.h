#pragma once

#include "attention/sm90/fwd_tile_list.h"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace sm90 {

/// What a forward kernel holds code for, so that what is off costs nothing.
enum class FwdBody {
    kFull,         // every row sees every key of its sequence
    kBanded,       // causal masks and windows
    kBandedShort,  // the same, for few keys
    kGeneral,      // softcap and ALiBi as well
    kShort,        // kBanded's masks, for short sequences
};

/// Tile and schedule of a forward kernel. Each consumer warpgroup owns 64 of
/// the block_m query rows and meets block_n keys at a time.
struct FwdTile {
    int block_m = 128;
    int block_n = 128;
    int q_stages = 2;            // 2: the next tile's Q is loaded while this one is worked on
    int kv_stages = 2;           // of K and of V
    bool register_q = false;     // Q is copied to registers at a tile's start, its stage free again
    bool ping_pong = true;       // warpgroups take turns with the tensor cores
    int turn_tail = 0;           // instructions of O += P V that are issued after the turn
    bool evict_hints = false;    // keep K and V in the L2, let Q go
    bool lazy_rescale = false;   // see OnlineSoftmax::probabilities
    bool rescale_first = false;  // O is rescaled between the two products of a step, not after them
    bool wait_first = false;     // softmax starts when both products of a step are done
    bool output_tile = true;     // O leaves by the copy engine; else straight from registers
    bool warp_stores = false;    // each warp its rows by itself, not each warpgroup
    bool vote_on_mask = false;   // without a band: no test per score where keys do not end
    int ctas_per_sm = 1;
};

/// Tiles of one warpgroup, so small that several CTAs share a multiprocessor: where a tile meets a
/// block or two of keys, one CTA's loads and stores are hidden by nothing but another CTA.
constexpr FwdTile short_fwd_tile(int head_dim) {
    FwdTile tile;
    tile.block_m = tile.block_n = kShortRows;
    tile.q_stages = 1;
    tile.kv_stages = head_dim <= 128 ? 2 : 1;
    tile.ping_pong = false;
    tile.output_tile = false;  // most tiles end within a warpgroup's rows
    tile.ctas_per_sm = head_dim == 64 ? 3 : 2;
    return tile;
}

/// Measured on an H200 (docs/attention_sm90.md). Registers bound the tiles: 232
/// per thread with two consumer warpgroups, 160 with three; so does shared
/// memory, 227 KB.
constexpr FwdTile fwd_tile(int head_dim, int head_dim_v, FwdBody body) {
    if (body == FwdBody::kShort) return short_fwd_tile(head_dim);
    FwdTile tile;
    if (head_dim == 64 && (body == FwdBody::kFull || body == FwdBody::kBanded)) {
        tile.block_m = 192;
        tile.lazy_rescale = true;
        tile.warp_stores = tile.vote_on_mask = body == FwdBody::kFull;
    } else if (head_dim == 64) {
        tile.kv_stages = 3;
    } else if (head_dim <= 128) {
        tile.evict_hints = body != FwdBody::kFull;
        tile.wait_first = true;
        tile.vote_on_mask = body == FwdBody::kFull;
        if (head_dim == 128 && body == FwdBody::kFull) {
            tile.register_q = true;
            tile.q_stages = 1;
            tile.wait_first = false;
            tile.turn_tail = 4;
        }
    } else {  // no room for a second Q or for an output tile
        tile.block_n = head_dim == 256     ? (body == FwdBody::kFull ? 80 : 64)
                       : head_dim_v == 192 ? 112
                                           : 128;
        tile.lazy_rescale = head_dim == 256;
        tile.q_stages = 1;
        tile.ping_pong = false;
        tile.rescale_first = true;
        tile.output_tile = false;
    }
    return tile;
}

/// kBandedShort serves up to this many keys.
constexpr int kFewKeys = 1024;

/// At head dim 256 up to so many keys are met in kBanded's blocks of 64 without a band, too: the
/// last of kFull's blocks of 80 would be filled by less than half.
constexpr int kFewFullKeys = 512;

/// Whether there are kernels of body kShort: with several CTAs on a multiprocessor ptxas has 128
/// registers for an instruction, and one product at head dim 256 takes more.
constexpr bool has_short_kernels(int head_dim) {
    return head_dim < 256;
}

/// Packed sequences of up to so many rows are worked on by kShort kernels: measured
/// (docs/attention_sm90.md).
constexpr int longest_short_sequence(int head_dim) {
    return !has_short_kernels(head_dim) ? 0 : head_dim == 64 ? 2 * kShortRows : kShortRows;
}

inline bool has_band(const AttentionProblem& problem) {
    return problem.window_left >= 0 || problem.window_right >= 0;
}

/// The body that has code for all that a call needs and no more. `head_dim` is that of the size
/// class.
inline FwdBody fwd_body(const AttentionProblem& problem, int head_dim) {
    if (problem.softcap > 0.0f || problem.alibi_slopes != nullptr) return FwdBody::kGeneral;
    // The lengths of packed sequences are not known on the host.
    const bool dense = !problem.is_packed();
    if (dense && problem.seqlen_q <= kShortRows && problem.seqlen_k <= kShortKeys &&
        has_short_kernels(head_dim)) {
        return FwdBody::kShort;
    }
    if (!has_band(problem)) {
        const bool smaller_blocks = head_dim == 256 && dense && problem.seqlen_k <= kFewFullKeys;
        return smaller_blocks ? FwdBody::kBanded : FwdBody::kFull;
    }
    return head_dim == 64 && dense && problem.seqlen_k <= kFewKeys ? FwdBody::kBandedShort
                                                                   : FwdBody::kBanded;
}

/// A forward kernel's parameters in the form of a type: what it computes, and
/// its tile.
template <class Element_, int kHeadDim_, int kHeadDimV_, FwdBody kBody_>
struct FwdKernel {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr FwdBody kBody = kBody_;
    static constexpr FwdTile kTile = fwd_tile(kHeadDim, kHeadDimV, kBody);
};

/// What follows from a FwdKernel.
template <class Kernel>
struct FwdConfig {
    using Element = typename Kernel::Element;
    static constexpr FwdTile kTile = Kernel::kTile;
    static constexpr FwdBody kBody = Kernel::kBody;
    static constexpr bool kBanded = kBody != FwdBody::kFull;
    static constexpr bool kGeneral = kBody == FwdBody::kGeneral;
    static constexpr int kHeadDim = Kernel::kHeadDim;
    static constexpr int kHeadDimV = Kernel::kHeadDimV;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kQStages = kTile.q_stages;
    static constexpr int kStages = kTile.kv_stages;
    // While a tile is worked on, Q of the next one may arrive.
    static constexpr bool kLoadsQAhead = kQStages > 1 || kTile.register_q;

    static constexpr int kConsumers = kBlockM / 64;  // warpgroups
    static constexpr int kThreads = 128 * (kConsumers + 1);
    static constexpr int kStoreRows = kTile.warp_stores ? 16 : 64;  // of one copy of O
    // ptxas gives every thread the same number of registers at first; the sum
    // over the warpgroups of all CTAs must not exceed the SM's 65536. With 24 the scheduler
    // spills.
    static constexpr int kCtasPerSm = kTile.ctas_per_sm;
    static constexpr int kProducerRegisters = kConsumers == 3 || kCtasPerSm == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = kConsumers == 3   ? 160
                                              : kConsumers == 2 ? 232
                                              : kCtasPerSm == 2 ? 216
                                                                : 128;

    using LayoutQ = TileLayout<kBlockM, kHeadDim>;
    using LayoutK = TileLayout<kBlockN, kHeadDim>;
    using LayoutV = TileLayout<kBlockN, kHeadDimV>;
    using LayoutO = TileLayout<kBlockM, kHeadDimV>;
    // A warpgroup's accumulators, in groups of eight columns
    static constexpr int kTilesN = kBlockN / 8;
    static constexpr int kTilesD = kHeadDimV / 8;

    // Under a band a warpgroup may leave out half of a tile's first block. No gain at 128.
    static constexpr bool kHalfBlocks =
        kBanded && !kGeneral && kBody != FwdBody::kShort && kHeadDim == 64;

    static_assert(kBlockM % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "64 rows each");
    static_assert(kBlockN % 16 == 0, "whole steps of P V");
};

}  // namespace sm90
}  // namespace flash_attn_norm
