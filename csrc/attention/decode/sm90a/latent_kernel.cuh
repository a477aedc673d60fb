#pragma once

#include <cstdint>

#include "attention/decode/packed_scores.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/sm90a/kv_tiles.cuh"
#include "attention/decode/sm90a/latent_config.h"
#include "attention/decode/sm90a/warpgroup_rows.cuh"
#include "attention/decode/warp_products.cuh"
#include "attention/sm90/warpgroup_mma.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace flash_attn_norm {
namespace decode {

/// One warp of the producer's: has the copy engine bring the rows, tile by tile.
template <class Config>
__device__ __forceinline__ void load_latent_tiles(const LatentParams& latent,
                                                  LatentSharedStorage<Config>& shared,
                                                  const SplitBlock& block,
                                                  const KeyRange& positions,
                                                  const KeyRange& tiles) {
    using Tile = typename Config::KTile;
    const TileCopies<Tile> copies(latent.split, block, positions, Config::kTileKeys);
    auto next = copies.find(tiles.begin);
    int stage = 0;
    uint32_t parity = 1;  // the stages are free at first
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const auto place = next;
        next = copies.find(tile + 1);  // a read of the page table, begun a tile ahead
        copies.load(place, &latent.map, ptx::shared_address(shared.kv[stage]), shared.full[stage],
                    shared.empty[stage], parity);
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }
}

/// O += softmax(Q K^T) V over `tiles`.
template <class Config>
__device__ __forceinline__ void consume_latent_tiles(LatentSharedStorage<Config>& shared,
                                                     WarpgroupRows<Config::kTilesD>& warp,
                                                     const PackedRows& rows, int first_position,
                                                     const BlockKeys& block_keys,
                                                     const KeyRange& tiles, float scale_log2) {
    using Element = typename Config::Element;
    const uint64_t q = Config::QTile::column_descriptor(ptx::shared_address(shared.q));
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        unsigned char* const keys = shared.kv[stage];
        unsigned char* const values =
            keys + warp.warpgroup * Config::VTile::kChunks * Config::VTile::kChunkBytes;

        // S = Q K^T
        float acc_s[1][Config::kTilesN][4];
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), parity);
        ptx::wgmma_fence();
        sm90::gemm_columns<Element, typename Config::QTile, typename Config::KTile>(
            acc_s, q, Config::KTile::column_descriptor(ptx::shared_address(keys)));
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();

        // P = exp2(S * scale_log2 - row_max); older output shrinks by the same factor
        const int position = tile * Config::kTileKeys, first_key = position - first_position;
        const bool is_whole = first_key >= block_keys.full.begin &&
                              first_key + Config::kTileKeys <= block_keys.full.end;
        uint32_t p[Config::kTileKeys / 4];
        weigh<Element>(p, acc_s, warp, rows, first_key, is_whole, scale_log2);

        // O += P V
        if (!is_whole) {  // the other warpgroup may read them as keys meanwhile: it uses no such
                          // score
            clear_unseen_rows<typename Config::VTile>(values, position, block_keys.positions,
                                                      warp.warpgroup);
        }
        ptx::wgmma_fence();
        sm90::gemm_rows<Element, typename Config::VTile>(
            warp.acc_o, p, Config::VTile::row_descriptor(ptx::shared_address(values)));
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<0>();
        if (warp.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[stage]));
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    latent_split_kernel(const __grid_constant__ LatentParams latent) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<LatentSharedStorage<Config>*>(shared_bytes);
    const SplitParams& params = latent.split;
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
        if (ptx::shared_address(shared_bytes) % 1024 != 0) __trap();  // swizzling needs it
        ptx::prefetch_tensormap(&latent.map);
        for (int i = 0; i < Config::kStages; ++i) {
            ptx::mbarrier_init(ptx::shared_address(&shared.full[i]), 1);
            ptx::mbarrier_init(ptx::shared_address(&shared.empty[i]), 4 * Config::kConsumers);
        }
        ptx::fence_mbarrier_init();
    }
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    SplitBlock block;
    if (!find_block(params, blockIdx.x, Config::kBlockM, block)) return;
    const BlockKeys keys(params, block, Config::kBlockM);
    const KeyRange tiles = split_tiles(keys.positions, Config::kTileKeys, 1,
                                       static_cast<int>(blockIdx.y), params.num_splits);
    __syncthreads();  // the barriers are there

    if (warpgroup == Config::kConsumers) {
        ptx::setmaxnreg_dec<40>();
        if (threadIdx.x / 32 == 4 * Config::kConsumers && !tiles.empty()) {
            load_latent_tiles(latent, shared, block, keys.positions, tiles);
        }
    } else {
        ptx::setmaxnreg_inc<232>();
        load_queries<Config::kHeadDim>(
            params, block, Config::kBlockM, static_cast<int>(threadIdx.x), 128 * Config::kConsumers,
            [&](int row, int unit) { return shared.q + Config::QTile::unit_offset(row, unit); });
        ptx::fence_proxy_async_shared();
        WarpgroupRows<Config::kTilesD> warp(warpgroup, 0, warpgroup * Config::kColumns);
        const PackedRows rows(params, block, keys.band, warp.row);
        const float scale_log2 = rows.scale_log2();
        ptx::bar_sync(1, 128 * Config::kConsumers);  // Q is there
        consume_latent_tiles(shared, warp, rows, block.first_position, keys, tiles, scale_log2);
        store_warpgroup_rows<Config>(warp, params, block, scale_log2, 1.0f);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
