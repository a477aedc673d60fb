#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/split_params.h"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace decode {

/// CTAs of the largest cluster. 9.0 has larger ones, but few of them fit the card at a time.
constexpr int kMaxClusterSplits = 8;

FAN_HOST_DEVICE constexpr int bulk_tile_keys(int head_dim, bool is_float8) {
    return (head_dim <= 128 ? 64 : 32) * (is_float8 ? 2 : 1);
}

/// Rows that can be copied at a time: as many as lie together and divide a tile; 0: fewer than 16,
/// too few for the copy engine (docs/decode.md), or more copies of a tile than a warp has lanes.
inline int bulk_copy_rows(const KvCacheLayout& cache, int tile_keys) {
    int rows = tile_keys;
    while (cache.is_paged && rows >= 16 && cache.entry_rows % rows != 0) rows /= 2;
    return rows >= 16 ? rows : 0;
}

/// The split kernel for few rows of capability 9.0: the element type of the products, a size class
/// of the head dims, and whether the cache is float8. One warp has the copy engine bring tiles of
/// kTileKeys keys and their values; kSetsPerTile warps, sets of their own, share a tile, kSetKeys
/// keys each, and take turns at the tiles with others.
template <class Element_, int kHeadDim_, bool kFloat8_>
struct BulkConfig {
    using Element = Element_;
    static constexpr bool kFloat8 = kFloat8_;
    static constexpr float kFloat8Scale = Sm90::kFloat8Scale;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDim_;
    static constexpr int kBlockM = 16;
    static constexpr int kTileKeys = bulk_tile_keys(kHeadDim, kFloat8);
    static constexpr int kSetKeys = kFloat8 ? 32 : 16;
    static constexpr int kSetsPerTile = kTileKeys / kSetKeys;
    /// Sets of a CTA, kMaxSets where one on each multiprocessor is enough for a call; and tiles of
    /// keys, and as many of values, in shared memory. Two CTAs of kSets fit a multiprocessor up to
    /// 128 columns. (More than 8 warps have 168 registers a thread, too few for more columns.)
    static constexpr int kSets = kHeadDim <= 128 ? 4 : 6, kMaxSets = kHeadDim <= 128 ? 8 : 6;
    static constexpr int kStages = kHeadDim == 128 ? 3 : 6;
    static constexpr int kMaxStages = kHeadDim == 64 ? 12 : 6;
    static_assert(kStages % (kSets / kSetsPerTile) == 0 &&
                      kMaxStages % (kMaxSets / kSetsPerTile) == 0,
                  "a stage belongs to the same sets for good: they wait for every phase of it");
    static constexpr bool kQInRegisters = kHeadDim <= 192;
    static constexpr int kPitch = kHeadDim + 8;     // of Q in shared memory: see pitch_of
    static constexpr int kPitchOut = kHeadDim + 8;  // of float32: see SplitSharedStorage
    static constexpr int kTilesN = kSetKeys / 8;
    static constexpr int kTilesD = kHeadDim / 8;
    using Tile = sm90::TileLayout<kTileKeys, kFloat8 ? kHeadDim / 2 : kHeadDim>;  // in 16 bits
    static_assert(kTileKeys / 16 * Tile::kChunks <= 32, "see bulk_copy_rows");
    FAN_HOST_DEVICE static constexpr int stages(int sets) {
        return sets == kMaxSets ? kMaxStages : kStages;
    }
    static constexpr int threads(int sets) { return 32 * (sets + 1); }
};

struct BulkParams {
    SplitParams split;
    bool in_cluster = false;  // see SplitPlan
    int copy_rows = 0;        // of the maps: those of a tile, or less where pages are smaller
    CUtensorMap map_k;
    CUtensorMap map_v;
};

/// The tiles of keys and values lie behind it; the sets' outputs take their place at the end.
template <class Config>
struct alignas(1024) BulkSharedStorage {
    uint64_t k_full[Config::kMaxStages], k_empty[Config::kMaxStages];
    uint64_t v_full[Config::kMaxStages], v_empty[Config::kMaxStages];
    float row_max[Config::kMaxSets][Config::kBlockM];  // base 2
    float row_sum[Config::kMaxSets][Config::kBlockM];
    float total_max[Config::kBlockM];  // over all sets
    float total_sum[Config::kBlockM];
    float score_factor[Config::kFloat8 ? Config::kBlockM : 1];  // see load_float8_queries
    alignas(16) uint16_t q[Config::kBlockM * Config::kPitch];
    /// What this CTA adds up of its cluster's outputs, from each CTA of it; their totals.
    alignas(16) float4 part[Config::kBlockM * Config::kHeadDimV / 4 + kMaxClusterSplits];
    float2 part_total[kMaxClusterSplits][Config::kBlockM];

    static constexpr int kStageBytes = 2 * Config::Tile::kBytes;
    static constexpr int kOutElements = Config::kBlockM * Config::kPitchOut;

    FAN_HOST_DEVICE unsigned char* tiles() { return reinterpret_cast<unsigned char*>(this + 1); }
    FAN_HOST_DEVICE float* out(int set) {
        return reinterpret_cast<float*>(this + 1) + set * kOutElements;
    }
    static constexpr int bytes(int sets) {
        const int operands = Config::stages(sets) * kStageBytes, outputs = sets * kOutElements * 4;
        return static_cast<int>(sizeof(BulkSharedStorage)) +
               (operands > outputs ? operands : outputs);
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
