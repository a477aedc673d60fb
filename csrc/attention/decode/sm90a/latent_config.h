#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/decode/split_params.h"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace decode {

constexpr int kLatentTileKeys = 64;

/// Multi-head latent attention with its projections absorbed, on capability 9.0: values are the
/// first columns of the keys' rows. Two warpgroups of consumers share a block of query rows, 256
/// value columns each; both compute all of its scores, so that neither waits for the other.
template <class Element_>
struct LatentConfig {
    using Element = Element_;
    static constexpr bool kFloat8 = false;
    static constexpr int kHeadDim = 576;
    static constexpr int kHeadDimV = 512;
    static constexpr int kBlockM = 64;
    static constexpr int kTileKeys = kLatentTileKeys;
    static constexpr int kStages = 2;
    static constexpr int kConsumers = 2;                     // warpgroups
    static constexpr int kThreads = 128 * (kConsumers + 1);  // and that of the producer
    static constexpr int kColumns = kHeadDimV / kConsumers;  // of the values, for a warpgroup
    static constexpr int kTilesN = kTileKeys / 8;
    static constexpr int kTilesD = kColumns / 8;
    using QTile = sm90::TileLayout<kBlockM, kHeadDim>;
    using KTile = sm90::TileLayout<kTileKeys, kHeadDim>;
    using VTile = sm90::TileLayout<kTileKeys, kColumns>;  // a part of KTile
    static_assert(QTile::kChunkColumns == VTile::kChunkColumns, "the chunks of one tile");
};

struct LatentParams {
    SplitParams split;
    CUtensorMap map;  // of the keys
};

template <class Config>
struct LatentSharedStorage {
    alignas(1024) unsigned char q[Config::QTile::kBytes];
    alignas(1024) unsigned char kv[Config::kStages][Config::KTile::kBytes];
    uint64_t full[Config::kStages], empty[Config::kStages];
};

}  // namespace decode
}  // namespace flash_attn_norm
