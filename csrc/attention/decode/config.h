#pragma once

#include <cstdint>

#include "attention/sm80/shared_storage.h"

namespace flash_attn_norm {
namespace decode {

/// How a CTA shares its work. Query rows of all heads of a group lie below each other in tiles of
/// 16 warps_m rows. warps_n sets of warps take turns at the tiles of tile_keys keys and merge their
/// results at the end; the warps_m * warps_d warps of a set share a tile, and warps_d of them the
/// value columns (each computes the scores anew). A set has a ring of `slots` tiles, of keys and
/// values in turn, all but one of them on their way while one is in use.
struct SplitTile {
    int warps_m, warps_n, warps_d, tile_keys, slots;
    bool q_in_registers;
};

/// Few rows: one step of decoding. A set is a single warp then, which waits for nobody. Everything
/// fits the 99 KB of the cards with the least shared memory (8.6, 8.9, 12.0), and twice the 227 KB
/// of 9.0; `slots` is odd, so that the tile to load beside keys is one of keys.
constexpr SplitTile split_tile(int head_dim, bool few_rows) {
    return few_rows ? (head_dim == 64    ? SplitTile{1, 4, 1, 16, 9, true}
                       : head_dim == 128 ? SplitTile{1, 4, 1, 16, 5, true}
                       : head_dim == 192 ? SplitTile{1, 4, 1, 16, 3, true}
                       : head_dim == 256 ? SplitTile{1, 3, 1, 16, 3, false}
                                         : SplitTile{1, 1, 2, 16, 3, false})  // 576
                    : (head_dim == 64    ? SplitTile{4, 1, 1, 64, 5, true}
                       : head_dim == 128 ? SplitTile{4, 1, 1, 64, 3, true}
                       : head_dim == 192 ? SplitTile{4, 1, 1, 32, 5, false}
                       : head_dim == 256 ? SplitTile{4, 1, 1, 32, 3, false}
                                         : SplitTile{2, 1, 2, 16, 3, false});  // 576
}

/// A split kernel: element type, size class of the head dims, and the number of query rows that it
/// is made for.
template <class Element_, int kHeadDim_, int kHeadDimV_, bool kFewRows>
struct SplitConfig {
    using Element = Element_;
    static constexpr SplitTile kTile = split_tile(kHeadDim_, kFewRows);
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    /// Values may be the first columns of the keys' rows: absorbed multi-head latent attention.
    static constexpr bool kMayShareRows = kHeadDim > kHeadDimV;
    static constexpr int kBlockM = 16 * kTile.warps_m;
    static constexpr int kSets = kTile.warps_n;
    static constexpr int kSetWarps = kTile.warps_m * kTile.warps_d;
    static constexpr int kThreads = 32 * kSets * kSetWarps;
    static constexpr int kTileKeys = kTile.tile_keys;
    static constexpr int kSlots = kTile.slots;
    static constexpr bool kQInRegisters = kTile.q_in_registers;
    static constexpr int kPitch = sm80::pitch_of(kHeadDim);
    static constexpr int kPitchOut = kHeadDimV + 8;  // of float32: see SplitSharedStorage
    static constexpr int kTilesN = kTileKeys / 8;
    static constexpr int kColumnsPerWarp = kHeadDimV / kTile.warps_d;
    static constexpr int kTilesD = kColumnsPerWarp / 8;
    static constexpr int kKeysPerWarp = kTileKeys / kSetWarps;  // that a warp loads
    static_assert(kSets == 1 || kSetWarps == 1, "a set is a warp or the whole CTA");
    static_assert(kSlots % 2 == 1 && kSlots >= 3, "see SplitTile");
    static_assert(kKeysPerWarp % 4 == 0 && kKeysPerWarp <= 32, "a warp loads four rows at a time");
};

template <class Config>
struct SplitSharedStorage {
    /// The operands' pitch is that of the portable kernels. The output's, in float32, lets the
    /// eight rows of an accumulator tile, two columns a lane, pass in two wavefronts.
    union {
        struct {
            alignas(16) uint16_t q[Config::kBlockM * Config::kPitch];
            alignas(16)
                uint16_t ring[Config::kSets * Config::kSlots][Config::kTileKeys * Config::kPitch];
        };
        alignas(16) float out[Config::kSets][Config::kBlockM * Config::kPitchOut];  // at the end
    };
    float row_max[Config::kSets][Config::kBlockM];  // base 2
    float row_sum[Config::kSets][Config::kBlockM];
};

}  // namespace decode
}  // namespace flash_attn_norm
