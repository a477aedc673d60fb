#pragma once

#include "attention/sm80/shared_storage.h"

namespace flash_attn_norm {
namespace sm80 {

/// Tile of the forward pass: kBlockM query rows against kBlockN keys at a time. warps_m warps share
/// the rows; warps_d of them work on the same rows (each computes the scores anew) and own a part
/// of the value columns.
struct FwdTile {
    int block_m, block_n, warps_m, warps_d, min_ctas;
    bool q_in_registers;
};

/// Everything fits the 99 KB of the cards with the least shared memory (8.6, 8.9, 12.0).
constexpr FwdTile fwd_tile(int head_dim, bool general) {
    return general && head_dim <= 128 ? FwdTile{64, 64, 4, 1, 2, false}
           : head_dim == 64           ? FwdTile{128, 128, 4, 1, 2, false}
           : head_dim == 96           ? FwdTile{128, 64, 4, 1, 2, false}
           : head_dim == 128          ? FwdTile{128, 64, 4, 1, 2, false}
           : head_dim == 192          ? FwdTile{64, 64, 4, 1, 2, false}
           : head_dim == 256          ? FwdTile{64, 64, 4, 1, 2, false}
                                      : FwdTile{32, 32, 2, 2, 1, false};  // 512
}

/// A forward kernel: element type, size class of the head dims, and whether it holds the code for
/// score terms and dropout.
template <class Element_, int kHeadDim_, int kHeadDimV_, bool kGeneral_>
struct FwdConfig {
    using Element = Element_;
    static constexpr FwdTile kTile = fwd_tile(kHeadDim_, kGeneral_);
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr bool kGeneral = kGeneral_;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kWarpsM = kTile.warps_m;
    static constexpr int kWarpsD = kTile.warps_d;
    static constexpr int kThreads = 32 * kWarpsM * kWarpsD;
    static constexpr int kMinCtas = kTile.min_ctas;
    static constexpr bool kQInRegisters = kTile.q_in_registers;
    static constexpr int kPitch = pitch_of(kHeadDim);
    static constexpr int kPitchV = pitch_of(kHeadDimV);
    // A warp's tile, in accumulator tiles of 16 rows and 8 columns
    static constexpr int kRowsPerWarp = kBlockM / kWarpsM;
    static constexpr int kTilesM = kRowsPerWarp / 16;
    static constexpr int kTilesN = kBlockN / 8;
    static constexpr int kColumnsPerWarp = kHeadDimV / kWarpsD;
    static constexpr int kTilesD = kColumnsPerWarp / 8;
};

/// Tile of the backward pass: kBlockN keys stay, kBlockM query rows pass by. Three ways to share
/// the work among the warps, each rows x columns: the scores (s: queries x keys), dK and dV (kv:
/// keys x head dim), dQ (q: queries x head dim). Scores may be too few for all warps.
struct BwdTile {
    int block_m, block_n, warps;
    int warps_s_m, warps_s_n;
    int warps_kv_n, warps_kv_d;
    int warps_q_m, warps_q_d;
    bool spread_loads;  // copies among the products of the scores, where two stages fit
};

/// kSmall fits 99 KB (capabilities 8.6, 8.9, 12.0), the other one the 163 KB of 8.0.
constexpr BwdTile bwd_tile(int head_dim, bool general, bool small) {
    return head_dim == 64    ? (small || general ? BwdTile{64, 128, 8, 2, 4, 4, 2, 2, 4, false}
                                                 : BwdTile{128, 128, 8, 4, 2, 4, 2, 4, 2, true})
           : head_dim == 96  ? (small ? BwdTile{64, 64, 8, 4, 2, 4, 2, 4, 2, false}
                                      : BwdTile{64, 128, 8, 2, 4, 4, 2, 4, 2, false})
           : head_dim == 128 ? (small ? BwdTile{64, 64, 8, 4, 2, 2, 4, 2, 4, false}
                                      : BwdTile{64, 128, 8, 2, 4, 4, 2, 2, 4, false})
           : head_dim == 192 ? (small ? BwdTile{32, 64, 8, 2, 4, 4, 2, 2, 4, false}
                                      : BwdTile{64, 64, 8, 2, 4, 2, 4, 2, 4, true})
           : head_dim == 256 ? (small     ? BwdTile{32, 32, 8, 2, 2, 2, 4, 2, 4, false}
                                : general ? BwdTile{64, 32, 8, 4, 2, 2, 4, 2, 4, false}
                                          : BwdTile{64, 64, 8, 2, 4, 2, 4, 2, 4, true})
                             : (small ? BwdTile{16, 16, 8, 1, 1, 1, 8, 1, 8, false}
                                      : BwdTile{32, 32, 8, 2, 2, 2, 4, 2, 4, false});  // 512
}

template <class Element_, int kHeadDim_, int kHeadDimV_, bool kGeneral_, bool kSmall_>
struct BwdConfig {
    using Element = Element_;
    static constexpr BwdTile kTile = bwd_tile(kHeadDim_, kGeneral_, kSmall_);
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    static constexpr bool kGeneral = kGeneral_;
    static constexpr int kBlockM = kTile.block_m;
    static constexpr int kBlockN = kTile.block_n;
    static constexpr int kThreads = 32 * kTile.warps;
    static constexpr int kPitch = pitch_of(kHeadDim);
    static constexpr int kPitchV = pitch_of(kHeadDimV);
    static constexpr int kPitchS = pitch_of(kBlockN);
    static constexpr bool kSpreadLoads = kTile.spread_loads;
    // Accumulator tiles (16 rows x 8 columns) of a warp
    static constexpr int kWarpsSM = kTile.warps_s_m;
    static constexpr int kWarpsS = kTile.warps_s_m * kTile.warps_s_n;
    static constexpr int kTilesSM = kBlockM / kTile.warps_s_m / 16;
    static constexpr int kTilesSN = kBlockN / kTile.warps_s_n / 8;
    static constexpr int kTilesKvN = kBlockN / kTile.warps_kv_n / 16;
    static constexpr int kTilesKD = kHeadDim / kTile.warps_kv_d / 8;
    static constexpr int kTilesVD = kHeadDimV / kTile.warps_kv_d / 8;
    static constexpr int kTilesQM = kBlockM / kTile.warps_q_m / 16;
    static constexpr int kTilesQD = kHeadDim / kTile.warps_q_d / 8;
    static_assert(kTile.warps_kv_n * kTile.warps_kv_d == kTile.warps, "dK and dV by all warps");
    static_assert(kTile.warps_q_m * kTile.warps_q_d == kTile.warps, "dQ by all warps");
    static_assert(!kSpreadLoads || kWarpsS == kTile.warps, "all warps copy");
    static_assert(kTilesSM * 16 * kTile.warps_s_m == kBlockM, "whole tiles");
    static_assert(kTilesSN * 8 * kTile.warps_s_n == kBlockN, "whole tiles");
    static_assert(kTilesKvN * 16 * kTile.warps_kv_n == kBlockN, "whole tiles");
    static_assert(kTilesQM * 16 * kTile.warps_q_m == kBlockM, "whole tiles");
    static_assert(kTilesKD * 8 * kTile.warps_kv_d == kHeadDim && kTilesKD % 2 == 0, "whole tiles");
    static_assert(kTilesVD * 8 * kTile.warps_kv_d == kHeadDimV && kTilesVD % 2 == 0, "whole tiles");
    static_assert(kTilesQD * 8 * kTile.warps_q_d == kHeadDim && kTilesQD % 2 == 0, "whole tiles");
};

}  // namespace sm80
}  // namespace flash_attn_norm
