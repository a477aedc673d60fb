#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/sm90/fwd_work.h"
#include "attention/sm90/pipeline.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// A tile that the copy engine and wgmma address.
template <class Layout>
struct alignas(1024) SharedTile {
    unsigned char bytes[Layout::kBytes];
};

struct Nothing {};

template <class Config>
struct FwdSharedStorage {
    SharedTile<typename Config::LayoutQ> q[Config::kQStages];
    SharedTile<typename Config::LayoutK> k[Config::kStages];
    SharedTile<typename Config::LayoutV> v[Config::kStages];
    std::conditional_t<Config::kTile.output_tile, SharedTile<typename Config::LayoutO>, Nothing>
        out;

    FwdWork work;  // the current tile
    PackedTile few_tiles[kFewTiles];
    int num_few_tiles;
    Mbarrier work_full, work_empty;
    Mbarrier q_full[Config::kQStages], q_empty[Config::kQStages];
    Mbarrier k_full[Config::kStages], k_empty[Config::kStages];
    Mbarrier v_full[Config::kStages], v_empty[Config::kStages];
};

}  // namespace sm90
}  // namespace flash_attn_norm
