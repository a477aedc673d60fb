#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/sm90/bwd_block.cuh"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace sm90 {

/// The backward kernel for head dims above 128: a cluster of two CTAs has 128 keys, 64 each, and
/// both go through the same blocks of 64 query rows. The CTAs exchange their dS, so that each has
/// half of the columns of dQ over all 128 keys: half as many sums leave for memory as with 64 keys.
///
/// Of the two consumer warpgroups one computes S, P and dV, the other one dP, dS, dK and dQ: each
/// product has all 64 keys, and P^T and dS^T are the A operands of dV and dK straight from
/// registers. So shared memory is read 5/8 as often as when each has half of every product.
template <class Element_, int kHeadDimV_, bool kGeneral_>
struct BwdClusterConfig {
    using Element = Element_;
    static constexpr int kHeadDim = 256;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr bool kGeneral = kGeneral_;  // has the code for softcap and ALiBi
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 64;  // of one CTA
    static constexpr int kTileKeys = 2 * kBlockN;
    static constexpr int kWarpgroups = 2;  // consumers, see ClusterRole; one more loads
    static constexpr int kConsumers = 128 * kWarpgroups;
    static constexpr int kThreads = kConsumers + 128;
    static constexpr int kStages = 2;  // of Q; dO has one
    static constexpr int kLoaderRegisters = 24;
    static constexpr int kConsumerRegisters = 240;

    using ChunkLayout = TileLayout<64, 64>;
    using QLayout = TileLayout<kBlockM, kHeadDim>;
    using DoutLayout = TileLayout<kBlockM, kHeadDimV>;
    using KLayout = TileLayout<kBlockN, kHeadDim>;
    using VLayout = TileLayout<kBlockN, kHeadDimV>;
    using PartnerKLayout = TileLayout<kBlockN, kHeadDim / 2>;
    using SLayout = TileLayout<kBlockM, kBlockN>;  // of dS: queries x keys

    // dQ lies in memory in parts of 64 columns, as the warpgroups round it.
    static constexpr int kDqColumns = kHeadDim / 2 / kWarpgroups;
    static constexpr bool kDqByRows = false, kDqTransposed = false;
    static constexpr int kDqEntries = kBlockM * kDqColumns;  // of a part
    static constexpr int kDqRegisters = kDqEntries / 128;

    // Steps of dK, 16 queries each, that are issued before the partner's dS is waited for; the
    // others run while dQ leaves.
    static constexpr int kEarlyDk = 1;

    static AccumulatorLayout dq_layout() {
        return AccumulatorLayout{kBlockM, kHeadDim,       /*threads=*/512, /*warps_rows=*/4,
                                 1,       kDqColumns / 8, /*vector=*/4};
    }
    static AccumulatorLayout key_gradient_layout(int head_dim) {
        return AccumulatorLayout{kBlockN,          head_dim, /*threads=*/2 * head_dim,
                                 /*warps_rows=*/4, 1,        /*tiles_columns=*/8,
                                 /*vector=*/4};
    }
};

/// What the consumer warpgroups do. The first one hands the weights of dP - delta in dS to the
/// second: P, or with softcap P times its slope, in fp32 as they lie in registers.
enum ClusterRole : int { kComputesProbabilities = 0, kComputesGradients = 1 };

/// Shared memory of a CTA. Tiles are aligned to the 1024 bytes of their swizzle's period.
template <class Config>
struct BwdClusterStorage {
    static constexpr int kStages = Config::kStages;

    alignas(1024) unsigned char k[Config::KLayout::kBytes];  // dK in the end
    alignas(1024) unsigned char v[Config::VLayout::kBytes];  // dV in the end
    alignas(1024) unsigned char partner_k[Config::PartnerKLayout::kBytes];
    alignas(1024) unsigned char q[kStages][Config::QLayout::kBytes];
    alignas(1024) unsigned char dout[Config::DoutLayout::kBytes];
    // Of a step's parity, as their barriers.
    alignas(1024) unsigned char ds[2][Config::SLayout::kBytes];
    alignas(1024) unsigned char partner_ds[2][Config::SLayout::kBytes];
    alignas(16) float weights[Config::kBlockM * Config::kBlockN];  // see ClusterRole
    alignas(16) float lse_log2[kStages][Config::kBlockM];
    alignas(16) float delta[Config::kBlockM];
    int index;  // of the tile, where rank 0 draws it
    BwdTile tile;
    uint64_t kv_full;
    uint64_t q_full[kStages], q_free[kStages];
    uint64_t dout_full, dout_free;
    uint64_t ds_full[2];  // the partner's dS has arrived
    uint64_t ds_free[2];  // the partner has used the dS that it got
    // Of a step's parity: dQ may be written, and whether it is stored or added (in order).
    uint64_t dq_go[2];
    int dq_is_first[2];
    uint64_t dq_free;  // the sums of dQ are zeros: who had their place before is done
    int rounds_unit;   // this tile was the unit's last
};

}  // namespace sm90
}  // namespace flash_attn_norm
