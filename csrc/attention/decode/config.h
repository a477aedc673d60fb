#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/float8.h"
#include "attention/tile_pitch.h"

namespace flash_attn_norm {
namespace decode {

/// How a CTA shares its work. Query rows of all heads of a group lie below each other in tiles of
/// 16 warps_m rows. Sets of warps take turns at the tiles of tile_keys keys and merge their results
/// at the end; the warps_m * warps_d warps of a set share a tile, and warps_d of them the value
/// columns (each computes the scores anew). A set has a ring of `slots` tiles, of keys and values
/// in turn, all but one of them on their way while one is in use. There are `sets` sets, or
/// more_sets if one CTA on each multiprocessor is enough for a call.
struct SplitTile {
    int warps_m, warps_d, sets, more_sets, tile_keys, slots;
    bool q_in_registers;
};

/// Few rows: one step of decoding. A set is a single warp then, which waits for nobody. `sets` sets
/// fit the 99 KB of the cards with the least shared memory (8.6, 8.9, 12.0), and twice the 227 KB
/// of 9.0. `slots` is odd, so that the tile to load beside keys is one of keys.
constexpr SplitTile split_tile(int head_dim, bool few_rows) {
    return few_rows ? (head_dim == 64    ? SplitTile{1, 1, 4, 8, 16, 9, true}
                       : head_dim == 128 ? SplitTile{1, 1, 4, 8, 16, 5, true}
                       : head_dim == 192 ? SplitTile{1, 1, 4, 8, 16, 3, true}
                       : head_dim == 256 ? SplitTile{1, 1, 3, 6, 16, 3, false}
                                         : SplitTile{1, 2, 1, 1, 16, 3, false})  // 576
                    : (head_dim == 64    ? SplitTile{4, 1, 1, 1, 64, 5, true}
                       : head_dim == 128 ? SplitTile{4, 1, 1, 1, 64, 3, true}
                       : head_dim == 192 ? SplitTile{4, 1, 1, 1, 32, 5, false}
                       : head_dim == 256 ? SplitTile{4, 1, 1, 1, 32, 3, false}
                                         : SplitTile{2, 2, 1, 1, 16, 3, false});  // 576
}

/// The same for float8 keys and values: as many bytes in flight, of more keys. (None for more than
/// 256 columns.)
constexpr SplitTile float8_split_tile(int head_dim, bool few_rows) {
    return few_rows ? (head_dim == 64    ? SplitTile{1, 1, 4, 8, 32, 9, true}
                       : head_dim == 128 ? SplitTile{1, 1, 4, 8, 32, 5, true}
                       : head_dim == 192 ? SplitTile{1, 1, 4, 8, 32, 3, true}
                                         : SplitTile{1, 1, 3, 6, 32, 3, false})  // 256
                    : (head_dim == 64    ? SplitTile{4, 1, 1, 1, 64, 7, true}
                       : head_dim == 128 ? SplitTile{4, 1, 1, 1, 64, 5, true}
                                         : SplitTile{4, 1, 1, 1, 32, 5, false});  // 192, 256
}

/// What the kernels of sm80/ may use, which run on every capability from 8.0 on, and those of
/// sm90/.
struct Sm80 {
    static constexpr bool kHasGridDependency = false;
    static constexpr bool kConvertsFloat8 = false;              // 8.9 would
    static constexpr float kFloat8Scale = kE4m3ToFloat16Scale;  // of what unpack_e4m3 leaves
};
struct Sm90 {
    static constexpr bool kHasGridDependency = true;
    static constexpr bool kConvertsFloat8 = true;
    static constexpr float kFloat8Scale = 1.0f;
};

/// A split kernel: element type of the products, size class of the head dims, the number of query
/// rows that it is made for, and whether the cache is float8.
template <class Arch_, class Element_, int kHeadDim_, int kHeadDimV_, bool kFewRows, bool kFloat8_>
struct SplitConfig {
    using Arch = Arch_;
    using Element = Element_;
    static constexpr bool kFloat8 = kFloat8_;
    static constexpr float kFloat8Scale = Arch::kFloat8Scale;
    using CacheElement = std::conditional_t<kFloat8, uint8_t, uint16_t>;
    static constexpr SplitTile kTile =
        kFloat8 ? float8_split_tile(kHeadDim_, kFewRows) : split_tile(kHeadDim_, kFewRows);
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDimV_;
    /// Values may be the first columns of the keys' rows: absorbed multi-head latent attention.
    static constexpr bool kMayShareRows = kHeadDim > kHeadDimV;
    static constexpr int kBlockM = 16 * kTile.warps_m;
    static constexpr int kMaxSets = kTile.more_sets;
    static constexpr int kSetWarps = kTile.warps_m * kTile.warps_d;
    static constexpr int kTileKeys = kTile.tile_keys;
    static constexpr int kSlots = kTile.slots;
    static constexpr bool kQInRegisters = kTile.q_in_registers;
    static constexpr int kPitch = pitch_of(kHeadDim);
    /// Of the tiles, in 16 bits each.
    static constexpr int kKvPitch = kFloat8 ? pitch_of(kHeadDim / 2) : kPitch;
    /// A warp copies rows 64 columns at a time, 16 bytes a lane: as many rows as there are lanes.
    static constexpr int kUnitColumns = 16 / sizeof(CacheElement);
    static constexpr int kLanesPerRow = 64 / kUnitColumns, kRowsPerCopy = 32 / kLanesPerRow;
    static constexpr int kPitchOut = kHeadDimV + 8;  // of float32: see SplitSharedStorage
    static constexpr int kTilesN = kTileKeys / 8;
    static constexpr int kColumnsPerWarp = kHeadDimV / kTile.warps_d;
    static constexpr int kTilesD = kColumnsPerWarp / 8;
    static constexpr int kKeysPerWarp = kTileKeys / kSetWarps;  // that a warp loads
    static constexpr int threads(int sets) { return 32 * kSetWarps * sets; }
    static_assert(kMaxSets == 1 || kSetWarps == 1, "a set is a warp or the whole CTA");
    static_assert(kSlots % 2 == 1 && kSlots >= 3, "see SplitTile");
    static_assert(kKeysPerWarp % kRowsPerCopy == 0 && kKeysPerWarp <= 32, "whole copies");
    static_assert(!kFloat8 || kHeadDim <= 256, "see float8_split_tile");
};

/// The sets' rings lie behind it. At the end the sets' outputs, in float32, take the place of q and
/// the rings: their pitch lets the eight rows of an accumulator tile, two columns a lane, pass in
/// two wavefronts.
template <class Config>
struct SplitSharedStorage {
    float row_max[Config::kMaxSets][Config::kBlockM];  // base 2
    float row_sum[Config::kMaxSets][Config::kBlockM];
    float total_max[Config::kBlockM];  // over all sets
    float total_sum[Config::kBlockM];
    float score_factor[Config::kFloat8 ? Config::kBlockM : 1];  // see load_float8_queries
    alignas(16) uint16_t q[Config::kBlockM * Config::kPitch];

    static constexpr int kTileElements = Config::kTileKeys * Config::kKvPitch;
    static constexpr int kOutElements = Config::kBlockM * Config::kPitchOut;

    FAN_HOST_DEVICE uint16_t* ring(int set) {
        return q + Config::kBlockM * Config::kPitch + set * Config::kSlots * kTileElements;
    }
    FAN_HOST_DEVICE float* out(int set) { return reinterpret_cast<float*>(q) + set * kOutElements; }
    static constexpr int bytes(int sets) {
        const int operands =
            static_cast<int>(sizeof(q)) + sets * Config::kSlots * kTileElements * 2;
        const int outputs = sets * kOutElements * 4;
        return static_cast<int>(sizeof(SplitSharedStorage) - sizeof(q)) +
               (operands > outputs ? operands : outputs);
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
