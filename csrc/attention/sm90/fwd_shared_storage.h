#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/sm90/fwd_work.h"
#include "attention/sm90/pipeline.cuh"
#include "ptx/mbarrier.cuh"

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

template <class Config>
__device__ __forceinline__ void init_barriers(FwdSharedStorage<Config>& shared) {
    shared.work_full.init(1);
    shared.work_empty.init(4 * Config::kConsumers + 1);  // the consumers' warps and the producer
    for (int i = 0; i < Config::kQStages; ++i) {
        shared.q_full[i].init(1);
        shared.q_empty[i].init(Config::kConsumers * (Config::kTile.register_q ? 4 : 1));
    }
    for (int i = 0; i < Config::kStages; ++i) {
        shared.k_full[i].init(1);
        shared.k_empty[i].init(Config::kConsumers);
        shared.v_full[i].init(1);
        shared.v_empty[i].init(Config::kConsumers);
    }
    ptx::fence_mbarrier_init();
}

}  // namespace sm90
}  // namespace flash_attn_norm
