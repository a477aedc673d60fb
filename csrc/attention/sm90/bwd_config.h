#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace sm90 {

/// How a kernel for head dims up to 128 goes through its work.
enum class BwdLoop {
    // A CTA goes on to further tiles, so that the loads of one and the gradients of the one before
    // overlap. The steps of head dim 128 are slower then.
    kManyTiles,
    kOneTile,
    // Steps of 80 queries instead of 64, head dim 128: fewer bytes of shared memory for each
    // product, and what registers P and dS take is short.
    kWideSteps,
};

/// The backward kernel for head dims up to 128: 128 keys stay, kBlockM query rows pass by. Each of
/// the two consumer warpgroups owns 64 keys: S^T and dP^T have keys as rows, so that P and dS are
/// the A operands of dV and dK straight from registers.
template <class Element_, int kHeadDim_, bool kGeneral_, BwdLoop kLoop>
struct BwdConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kGeneral = kGeneral_;  // has the code for softcap and ALiBi
    static constexpr bool kPersists = kLoop == BwdLoop::kManyTiles;
    static constexpr bool kIsWide = kLoop == BwdLoop::kWideSteps;
    static constexpr int kBlockM = kHeadDim == 64 ? 128 : kIsWide ? 80 : 64;
    static constexpr int kBlockN = 128;
    static constexpr int kWarpgroups = 2;  // consumers; one more loads
    static constexpr int kConsumers = 128 * kWarpgroups;
    static constexpr int kThreads = kConsumers + 128;
    static constexpr int kStages = 2;  // of Q and of dO
    static constexpr int kLoaderRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    // Whether dS of 16 queries is stored while P of the next 16 is computed, or all after all.
    static constexpr bool kStreamsScores = kBlockM == 128;

    static constexpr int kSteps = kBlockM / 16;  // of 16 queries
    // Those whose P does not wait for dP, and those of which dV does not either: P of those is
    // rounded while S and dP are there.
    static constexpr int kEarlyP = kStreamsScores ? kSteps / 2 : kSteps;
    static constexpr int kEarlyDv = kIsWide ? 0 : kEarlyP;
    // dV of the steps before this one is issued while dS of the others is stored.
    static constexpr int kMiddleDv = kIsWide ? 2 : kEarlyDv;

    // Whether an idle warp zeroes sums of dQ of later units (BwdPlan::units_ahead). Steps of 64
    // queries do without: ptxas spills the bounds of their loops then.
    static constexpr bool kZeroesLater = !kPersists && (kIsWide || kGeneral);

    // LSE and delta are loaded this many steps of 16 queries before they are used, the first ones
    // while the products run.
    static constexpr int kRowsAhead = kBlockM == 64 ? kSteps : 2;
    // Whether a step's dQ is announced to the warp that adds it only after the next step's first
    // products: the fence before it waits for the stores.
    static constexpr bool kAnnouncesLate = kBlockM == 128;
    // Steps of dK that are issued before the consumers meet over dS, so that products run
    // meanwhile.
    static constexpr int kEarlyDk = kIsWide ? 1 : 2;

    using QLayout = TileLayout<kBlockM, kHeadDim>;  // of dO as well
    using KLayout = TileLayout<kBlockN, kHeadDim>;  // of V as well
    using SLayout = TileLayout<kBlockM, kBlockN>;   // of dS: queries x keys

    // dK and dV leave by way of dS, so that the next K and V come meanwhile, or where there is no
    // room and no next tile, by way of K and V.
    static constexpr bool kStagesInDs = !kIsWide;
    static constexpr int kDsBytes = kStagesInDs && SLayout::kBytes < 2 * KLayout::kBytes
                                        ? 2 * KLayout::kBytes
                                        : SLayout::kBytes;

    // dQ: each warpgroup has 64 rows or half of the columns; of a tile whose rows are not whole
    // sets of 64 it computes dQ^T, whose rows are those columns.
    static constexpr bool kDqByRows = kBlockM == 128;
    static constexpr bool kDqTransposed = kIsWide;
    static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / kWarpgroups;
    static constexpr int kDqEntries = kBlockM * kHeadDim / kWarpgroups;  // of a warpgroup
    static constexpr int kDqRegisters = kDqEntries / 128;

    static_assert(kBlockN == 64 * kWarpgroups, "64 keys for each warpgroup");
    static_assert(kHeadDim % 64 == 0, "dQ columns are cut between chunks");

    static AccumulatorLayout dq_layout() {
        AccumulatorLayout layout{kBlockM, kHeadDim,       kConsumers,  kDqByRows ? 8 : 4,
                                 1,       kDqColumns / 8, /*vector=*/4};
        if (kDqTransposed) {
            layout.tiles_columns = kBlockM / 8;
            layout.transposed = true;
        }
        return layout;
    }
    static AccumulatorLayout key_gradient_layout() {
        return AccumulatorLayout{kBlockN, kHeadDim, kConsumers, 8, 1, kHeadDim / 8, /*vector=*/4};
    }
};

/// Shared memory of a CTA. Tiles are aligned to the 1024 bytes of their swizzle's period.
template <class Config>
struct BwdSharedStorage {
    static constexpr int kStages = Config::kStages;

    alignas(1024) unsigned char k[Config::KLayout::kBytes];
    alignas(1024) unsigned char v[Config::KLayout::kBytes];
    alignas(1024) unsigned char q[kStages][Config::QLayout::kBytes];
    alignas(1024) unsigned char dout[kStages][Config::QLayout::kBytes];
    alignas(1024) unsigned char ds[Config::kDsBytes];
    alignas(16) float dq[Config::kWarpgroups][Config::kDqEntries];
    alignas(16) float lse_log2[kStages][Config::kBlockM];
    alignas(16) float delta[kStages][Config::kBlockM];
    BwdTile tile;          // the consumers': at a fixed place, so that no register points at it
    uint32_t tiles_begun;  // by the consumers, this one included
    BwdTile ahead[2];      // of the other warps, who may be a tile ahead or behind
    int rounds_unit;       // this tile was the unit's last
    uint64_t tile_full[2], tile_free[2];
    uint64_t kv_full, kv_free;
    uint64_t q_full[kStages], q_free[kStages];
    uint64_t dout_full[kStages], dout_free[kStages];
};

}  // namespace sm90
}  // namespace flash_attn_norm
