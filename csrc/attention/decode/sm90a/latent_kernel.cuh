#pragma once

#include <cstdint>

#include "attention/decode/packed_scores.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/row_total.cuh"
#include "attention/decode/sm90a/kv_tiles.cuh"
#include "attention/decode/sm90a/latent_config.h"
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
        const uint32_t full = ptx::shared_address(&shared.full[stage]);
        if (threadIdx.x % 32 == 0) {
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), parity);
            ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes);
        }
        __syncwarp();
        copies.copy(place, &latent.map, ptx::shared_address(shared.kv[stage]), full);
        __syncwarp();
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }
}

/// A consumer warp's place and its state over the key loop.
template <class Config>
struct LatentWarp {
    int lane, warpgroup;
    int row;  // this lane's first one in the block
    OnlineSoftmax<1> softmax;
    float acc_o[1][Config::kTilesD][4];

    __device__ __forceinline__ explicit LatentWarp(int warpgroup_)
        : lane(static_cast<int>(threadIdx.x) % 32),
          warpgroup(warpgroup_),
          row(static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4) {
        clear(acc_o);
    }
};

/// Zeros in place of values that no row sees, which may be anything, in the warpgroup's columns.
/// The other one may read them as keys meanwhile: it does not use the scores.
template <class Config>
__device__ __forceinline__ void clear_unseen_columns(unsigned char* values, int position,
                                                     const KeyRange& positions, int warpgroup) {
    using Tile = typename Config::VTile;
    for (int i = static_cast<int>(threadIdx.x) % 128; i < Config::kTileKeys * Config::kColumns / 8;
         i += 128) {
        const int row = i % Config::kTileKeys, unit = i / Config::kTileKeys;
        if (position + row >= positions.begin && position + row < positions.end) continue;
        *reinterpret_cast<uint4*>(values + Tile::unit_offset(row, unit)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(2 + warpgroup, 128);
}

/// O += softmax(Q K^T) V over `tiles`.
template <class Config>
__device__ __forceinline__ void consume_latent_tiles(LatentSharedStorage<Config>& shared,
                                                     LatentWarp<Config>& warp,
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

        // P = exp2(S * scale_log2 - row_max), in place; older output shrinks by the same factor
        const int position = tile * Config::kTileKeys, first_key = position - first_position;
        const int key = first_key + 2 * (warp.lane % 4);
        const bool is_whole = first_key >= block_keys.full.begin &&
                              first_key + Config::kTileKeys <= block_keys.full.end;
        if (rows.has_terms) rows.apply_terms(acc_s, key);
        if (!is_whole) rows.apply_mask(acc_s, key);
        update_softmax(warp.softmax, acc_s, warp.acc_o, scale_log2);
        uint32_t p[Config::kTileKeys / 4];
#pragma unroll
        for (int i = 0; i < Config::kTileKeys / 4; ++i) {
            p[i] = Element::pack(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
        }

        // O += P V
        if (!is_whole) {
            clear_unseen_columns<Config>(values, position, block_keys.positions, warp.warpgroup);
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

/// Writes the warp's rows: the result if there is one split, else this split's part of it.
template <class Config>
__device__ __forceinline__ void store_latent_output(LatentWarp<Config>& warp,
                                                    const SplitParams& params,
                                                    const SplitBlock& block, float scale_log2) {
    using Element = typename Config::Element;
    const bool covered = block.batch < params.batch_size;
    const bool writes_lse = warp.warpgroup == 0 && warp.lane % 4 == 0;
    const int first_column = warp.warpgroup * Config::kColumns + 2 * (warp.lane % 4);
    const int columns = params.head_units_v * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(warp.softmax.row_sum[0][r]);
        const int tile_row = warp.row + 8 * r;
        if (tile_row >= block.num_rows) continue;
        const PackedRow packed = block.packed_row(params.group_size, tile_row);
        const int64_t row = block.row_q + packed.row;
        const int64_t place = row * params.num_heads_q + packed.head;
        const RowTotal total{scaled_max(warp.softmax.row_max[0][r], scale_log2), sum};
        if (params.num_splits == 1) {
            float normalizer;
            const float lse = total.finish(sink_of(params, covered, packed.head), normalizer);
            if (writes_lse) {
                params.softmax_lse[lse_index(params, row, block.batch, packed.head)] = lse;
            }
            uint16_t* out = static_cast<uint16_t*>(params.out) + place * columns + first_column;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                if (first_column + 8 * d >= columns) break;
                *reinterpret_cast<uint32_t*>(out + 8 * d) = Element::pack(
                    warp.acc_o[0][d][2 * r] * normalizer, warp.acc_o[0][d][2 * r + 1] * normalizer);
            }
        } else {
            const int64_t part = int64_t{blockIdx.y} * params.total_rows + place;
            if (writes_lse) {
                params.partial_lse[part] = total.lse_log2();
            }
            if (!total.has_keys()) continue;
            const float normalizer = ptx::rcp_approx(sum);
            float* out = params.partial_out + part * columns + first_column;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                if (first_column + 8 * d >= columns) break;
                *reinterpret_cast<float2*>(out + 8 * d) = make_float2(
                    warp.acc_o[0][d][2 * r] * normalizer, warp.acc_o[0][d][2 * r + 1] * normalizer);
            }
        }
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
        LatentWarp<Config> warp(warpgroup);
        const PackedRows rows(params, block, keys.band, warp.row);
        const float scale_log2 = rows.has_terms ? kLog2E : params.softmax_scale * kLog2E;
        ptx::bar_sync(1, 128 * Config::kConsumers);  // Q is there
        consume_latent_tiles(shared, warp, rows, block.first_position, keys, tiles, scale_log2);
        store_latent_output(warp, params, block, scale_log2);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
