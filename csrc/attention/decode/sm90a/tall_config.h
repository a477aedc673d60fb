#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/sm90a/bulk_config.h"
#include "attention/decode/split_params.h"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace decode {

constexpr int kTallTileKeys = 64;

/// The split kernel of capability 9.0 for more rows than BulkConfig takes: warpgroups of 64 packed
/// rows multiply with wgmma, kConsumers of them with the same tiles, which one warp has the copy
/// engine bring. Tiles of a float8 cache are made float16 once for all rows, in a place of their
/// own.
template <class Element_, int kHeadDim_, bool kFloat8_, int kConsumers_>
struct TallConfig {
    using Element = Element_;
    static constexpr bool kFloat8 = kFloat8_;
    static constexpr float kFloat8Scale = Sm90::kFloat8Scale;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kHeadDimV = kHeadDim_;
    static constexpr int kConsumers = kConsumers_;  // warpgroups
    static constexpr int kConsumerThreads = 128 * kConsumers;
    /// And the producer: a warp, or a warpgroup that leaves its registers to two others.
    static constexpr bool kMovesRegisters = kConsumers > 1;
    static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);
    static constexpr int kBlockM = 64 * kConsumers;
    static constexpr int kTileKeys = kTallTileKeys;
    static constexpr int kTilesN = kTileKeys / 8;
    static constexpr int kTilesD = kHeadDim / 8;
    using QTile = sm90::TileLayout<kBlockM, kHeadDim>;
    using KvTile = sm90::TileLayout<kTileKeys, kHeadDim>;                         // to multiply
    using Tile = sm90::TileLayout<kTileKeys, kFloat8 ? kHeadDim / 2 : kHeadDim>;  // in 16 bits
    /// What registers are limited for and the plan counts on.
    static constexpr int kCtasPerSm = kConsumers > 1 || kHeadDim > 128 ? 1 : 2;
    static constexpr int kStageBytes = 2 * Tile::kBytes;
    static constexpr int kOperandBytes = kFloat8 ? 2 * KvTile::kBytes : 0;
    /// As many as the 228 KB of a multiprocessor leave, beside what CUDA keeps and 1 KB of barriers
    /// and factors for each CTA, up to six.
    static constexpr int kRoomForStages =
        (228 * 1024 / kCtasPerSm / 1024 - 2) * 1024 - QTile::kBytes - kOperandBytes;
    static constexpr int kStages =
        kRoomForStages / kStageBytes < 6 ? kRoomForStages / kStageBytes : 6;
    static_assert(kStages >= 2, "one in use, one on its way");
};

/// The operands of a float8 cache and the stages lie behind it.
template <class Config>
struct alignas(1024) TallSharedStorage {
    uint64_t k_full[Config::kStages], k_empty[Config::kStages];
    uint64_t v_full[Config::kStages], v_empty[Config::kStages];
    float score_factor[Config::kFloat8 ? Config::kBlockM : 1];  // see load_float8_queries
    alignas(1024) unsigned char q[Config::QTile::kBytes];

    static constexpr int kStageBytes = Config::kStageBytes;

    FAN_HOST_DEVICE unsigned char* operands() { return reinterpret_cast<unsigned char*>(this + 1); }
    FAN_HOST_DEVICE unsigned char* tiles() { return operands() + Config::kOperandBytes; }
    static constexpr int bytes() {
        return static_cast<int>(sizeof(TallSharedStorage)) + Config::kOperandBytes +
               Config::kStages * kStageBytes;
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
