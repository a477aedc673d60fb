#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace sm90 {

/// The backward kernel for head dims up to 128: 128 keys stay, kBlockM query rows pass by. Each of
/// the two consumer warpgroups owns 64 keys: S^T and dP^T have keys as rows, so that P and dS are
/// the A operands of dV and dK straight from registers.
///
/// kPersists_: whether a CTA goes on to further tiles, so that the loads of one and the gradients
/// of the one before overlap. The steps of head dim 128 are slower then.
template <class Element_, int kHeadDim_, bool kGeneral_, bool kPersists_>
struct BwdConfig {
    using Element = Element_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kGeneral = kGeneral_;  // has the code for softcap and ALiBi
    static constexpr bool kPersists = kPersists_;
    static constexpr int kBlockM = kHeadDim == 64 ? 128 : 64;
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
    // Those whose P and part of dV do not wait for dP.
    static constexpr int kEarlySteps = kStreamsScores ? kSteps / 2 : kSteps;

    // LSE and delta are loaded this many steps of 16 queries before they are used, the first ones
    // while the products run.
    static constexpr int kRowsAhead = kBlockM == 128 ? 2 : kBlockM / 16;
    // Whether a step's dQ is announced to the warp that adds it only after the next step's first
    // products: the fence before it waits for the stores.
    static constexpr bool kAnnouncesLate = kBlockM == 128;
    // Steps of dK that are issued before the consumers meet over dS, so that products run
    // meanwhile.
    static constexpr int kEarlyDk = 2;

    using QLayout = TileLayout<kBlockM, kHeadDim>;  // of dO as well
    using KLayout = TileLayout<kBlockN, kHeadDim>;  // of V as well
    using SLayout = TileLayout<kBlockM, kBlockN>;   // of dS: queries x keys

    // dQ: each warpgroup has 64 rows or, of a tile with 64 rows, half of the columns.
    static constexpr bool kDqByRows = kBlockM == 128;
    static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / kWarpgroups;
    static constexpr int kDqEntries = kBlockM * kHeadDim / kWarpgroups;  // of a warpgroup

    static_assert(kBlockN == 64 * kWarpgroups, "64 keys for each warpgroup");
    static_assert(kHeadDim % 64 == 0, "dQ columns are cut between chunks");

    static AccumulatorLayout dq_layout() {
        return AccumulatorLayout{kBlockM, kHeadDim,       kConsumers,  kDqByRows ? 8 : 4,
                                 1,       kDqColumns / 8, /*vector=*/4};
    }
    static AccumulatorLayout key_gradient_layout() {
        return AccumulatorLayout{kBlockN, kHeadDim, kConsumers, 8, 1, kHeadDim / 8, /*vector=*/4};
    }
};

constexpr int larger(int a, int b) {
    return a > b ? a : b;
}

/// Shared memory of a CTA. Tiles are aligned to the 1024 bytes of their swizzle's period.
template <class Config>
struct BwdSharedStorage {
    static constexpr int kStages = Config::kStages;

    alignas(1024) unsigned char k[Config::KLayout::kBytes];
    alignas(1024) unsigned char v[Config::KLayout::kBytes];
    alignas(1024) unsigned char q[kStages][Config::QLayout::kBytes];
    alignas(1024) unsigned char dout[kStages][Config::QLayout::kBytes];
    // dS, and in the end dK and dV, so that the next K and V come meanwhile.
    alignas(1024) unsigned char ds[larger(Config::SLayout::kBytes, 2 * Config::KLayout::kBytes)];
    alignas(16) float dq[Config::kWarpgroups][Config::kDqEntries];
    alignas(16) float lse_log2[kStages][Config::kBlockM];
    alignas(16) float delta[kStages][Config::kBlockM];
    BwdTile tile;          // the consumers': at a fixed place, so that no register points at it
    uint32_t tiles_begun;  // by the consumers, this one included
    BwdTile ahead[2];      // of the other warps, who may be a tile ahead or behind
    uint64_t tile_full[2], tile_free[2];
    uint64_t kv_full, kv_free;
    uint64_t q_full[kStages], q_free[kStages];
    uint64_t dout_full[kStages], dout_free[kStages];
};

}  // namespace sm90
}  // namespace flash_attn_norm
