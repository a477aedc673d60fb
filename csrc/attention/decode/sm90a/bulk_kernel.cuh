#pragma once

#include <cstdint>

#include "attention/decode/float8_products.cuh"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/sm90a/bulk_config.h"
#include "attention/decode/sm90a/bulk_output.cuh"
#include "attention/decode/sm90a/kv_tiles.cuh"
#include "attention/decode/warp_products.cuh"
#include "attention/warp_mma.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace decode {

/// A consumer warp, a set of its own, and its state over the key loop.
template <class Config>
struct BulkWarp {
    int lane, sets, set;
    static constexpr int row = 0, column = 0;
    OnlineSoftmax<1> softmax;
    float acc_o[1][Config::kTilesD][4];

    __device__ __forceinline__ BulkWarp()
        : lane(static_cast<int>(threadIdx.x) % 32),
          sets(static_cast<int>(blockDim.x) / 32 - 1),
          set(static_cast<int>(threadIdx.x) / 32) {
        clear(acc_o);
    }
};

/// Zeros in place of values that no row sees, which may be anything: a set's rows, from `first` on.
template <class Config>
__device__ __forceinline__ void clear_unseen_values(unsigned char* tile, int first, int position,
                                                    const KeyRange& positions, int lane) {
    using Tile = typename Config::Tile;
    for (int i = lane; i < Config::kSetKeys * Tile::kChunks * Tile::kUnitsPerRow; i += 32) {
        const int row = i % Config::kSetKeys, unit = i / Config::kSetKeys;
        if (position + row >= positions.begin && position + row < positions.end) continue;
        *reinterpret_cast<uint4*>(tile + Tile::unit_offset(first + row, unit)) =
            make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();  // before the copy engine writes here again
    __syncwarp();
}

/// The 16 rows of Q, in registers where there is room, and their products with a set's keys.
template <class Config>
struct BulkQueries {
    static constexpr int kSteps = Config::kHeadDim / 16;
    uint32_t base;  // of its fragments in shared memory
    uint32_t fragments[Config::kQInRegisters ? kSteps : 1][4];
    const float* score_factors;  // float8: of this lane's rows, in shared memory, for registers

    __device__ __forceinline__ BulkQueries(BulkSharedStorage<Config>& shared, int lane)
        : base(a_base<Layout::kContractionInner, Config::kPitch>(ptx::shared_address(shared.q),
                                                                 lane)),
          score_factors(shared.score_factor + lane / 4) {
        if constexpr (Config::kQInRegisters) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                load_a<Layout::kContractionInner, Config::kPitch>(fragments[k], base, 0, k);
            }
        }
    }

    __device__ __forceinline__ void load(uint32_t (&a)[4], int k) const {
        if constexpr (Config::kQInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[k][i];
        } else {
            load_a<Layout::kContractionInner, Config::kPitch>(a, base, 0, k);
        }
    }

    /// acc_s += Q K^T; load_k(b, n, pair) gives two units of keys 16 n...
    template <class LoadK>
    __device__ __forceinline__ void multiply(float (&acc_s)[1][Config::kTilesN][4],
                                             LoadK&& load_k) const {
        if constexpr (Config::kFloat8) {
            multiply_float8_keys<Sm90, kSteps>(
                acc_s, [&](uint32_t (&a)[4], int k) { load(a, k); }, load_k, Nothing{});
            scale_scores(acc_s, {score_factors[0], score_factors[8]});
        } else {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                uint32_t a[4], b[4];
                load_k(b, 0, k);
                load(a, k);
                Config::Element::mma(acc_s[0][0], a, b[0], b[1]);
                Config::Element::mma(acc_s[0][1], a, b[2], b[3]);
            }
        }
    }
};

/// acc_o += P V; load_v(b, n, k) gives two units of keys 16 k.., transposed.
template <class Config, class LoadV>
__device__ __forceinline__ void multiply_set_values(float (&acc_o)[1][Config::kTilesD][4],
                                                    const float (&p)[1][Config::kTilesN][4],
                                                    LoadV&& load_v) {
    using Element = typename Config::Element;
    if constexpr (Config::kFloat8) {
        multiply_float8_values<Sm90>(acc_o, p, load_v, Nothing{});
    } else {
        const uint32_t a[4] = {
            Element::pack(p[0][0][0], p[0][0][1]), Element::pack(p[0][0][2], p[0][0][3]),
            Element::pack(p[0][1][0], p[0][1][1]), Element::pack(p[0][1][2], p[0][1][3])};
#pragma unroll
        for (int n = 0; n < Config::kTilesD / 2; ++n) {
            uint32_t b[4];
            load_v(b, n, 0);
            Element::mma(acc_o[0][2 * n], a, b[0], b[1]);
            Element::mma(acc_o[0][2 * n + 1], a, b[2], b[3]);
        }
    }
}

/// O += softmax(Q K^T) V over every second or so of the tiles: see BulkConfig.
template <class Config>
__device__ __forceinline__ void consume_kv_tiles(BulkSharedStorage<Config>& shared,
                                                 BulkWarp<Config>& warp, const SplitParams& params,
                                                 const SplitBlock& block, const BlockKeys& keys,
                                                 const KeyRange& tiles) {
    using Tile = typename Config::Tile;
    const int stages = Config::stages(warp.sets), groups = warp.sets / Config::kSetsPerTile;
    const int first_row = warp.set % Config::kSetsPerTile * Config::kSetKeys;
    const auto q_place = [&](int row, int unit) {
        return &shared.q[row * Config::kPitch + unit * 8];
    };
    if constexpr (Config::kFloat8) {
        load_float8_queries<Config::kHeadDim, ColumnOrder::kEvenFirst>(
            params, block, Config::kBlockM, warp.set, warp.sets, key_factor<Config>(params, block),
            shared.score_factor, q_place);
    } else {
        load_queries<Config::kHeadDim>(params, block, Config::kBlockM,
                                       static_cast<int>(threadIdx.x), 32 * warp.sets, q_place);
    }
    const PackedRows rows(params, block, keys.band, warp.lane / 4);
    const float scale_log2 = rows.scale_log2();
    ptx::bar_sync(1, 32 * warp.sets);  // Q is there

    const BulkQueries<Config> queries(shared, warp.lane);

    // This lane's addresses for ldmatrix in a tile at 0; other units of a chunk differ in two bits,
    // or in one where a chunk has two pairs of units
    const uint32_t k_lane = static_cast<uint32_t>(
        Tile::unit_offset(first_row + warp.lane % 8 + warp.lane / 16 * 8, warp.lane / 8 % 2));
    const uint32_t v_lane =
        static_cast<uint32_t>(Tile::unit_offset(first_row + warp.lane % 16, warp.lane / 16));
    const auto at_pair = [](uint32_t address, int pair) {  // of units
        constexpr int kPairs = Tile::kUnitsPerRow / 2;
        return (address ^ static_cast<uint32_t>(pair % kPairs * 32)) +
               static_cast<uint32_t>(pair / kPairs * Tile::kChunkBytes);
    };
    constexpr uint32_t kSixteenKeys = 16 * Tile::kRowBytes;
    unsigned char* const ring = shared.tiles();
    const uint32_t ring_address = ptx::shared_address(ring);
    int stage = warp.set / Config::kSetsPerTile;
    uint32_t parity = 0;

#pragma unroll 1
    for (int tile = tiles.begin + stage; tile < tiles.end; tile += groups) {
        const uint32_t offset =
            static_cast<uint32_t>(stage) * BulkSharedStorage<Config>::kStageBytes;

        // S = Q K^T
        float acc_s[1][Config::kTilesN][4];
        clear(acc_s);
        ptx::mbarrier_wait(ptx::shared_address(&shared.k_full[stage]), parity);
        const uint32_t k_tile = ring_address + offset + k_lane;
        queries.multiply(acc_s, [&](uint32_t (&b)[4], int n, int pair) {
            ptx::ldmatrix_x4(b, at_pair(k_tile, pair) + n * kSixteenKeys);
        });
        if (warp.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.k_empty[stage]));

        // P = exp2(S * scale_log2 - row_max), in place; older output shrinks by the same factor
        const int position = tile * Config::kTileKeys + first_row;
        const int first_key = position - block.first_position;
        const int key = first_key + 2 * (warp.lane % 4);
        if (rows.has_terms) rows.apply_terms(acc_s, key);
        const bool is_whole =
            first_key >= keys.full.begin && first_key + Config::kSetKeys <= keys.full.end;
        if (!is_whole) rows.apply_mask(acc_s, key);
        update_softmax(warp.softmax, acc_s, warp.acc_o, scale_log2);

        // O += P V
        ptx::mbarrier_wait(ptx::shared_address(&shared.v_full[stage]), parity);
        if (!is_whole) {
            clear_unseen_values<Config>(ring + offset + Tile::kBytes, first_row, position,
                                        keys.positions, warp.lane);
        }
        const uint32_t v_tile = ring_address + offset + Tile::kBytes + v_lane;
        multiply_set_values<Config>(warp.acc_o, acc_s, [&](uint32_t (&b)[4], int n, int k) {
            ptx::ldmatrix_x4_trans(b, at_pair(v_tile, n) + k * kSixteenKeys);
        });
        __syncwarp();
        if (warp.lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.v_empty[stage]));
        stage += groups;
        if (stage >= stages) stage -= stages, parity ^= 1;
    }
    // In base 2 from here on
    warp.softmax.row_max[0][0] = scaled_max(warp.softmax.row_max[0][0], scale_log2);
    warp.softmax.row_max[0][1] = scaled_max(warp.softmax.row_max[0][1], scale_log2);
}

template <class Config>
__global__ void __launch_bounds__(Config::threads(Config::kMaxSets), 1)
    bulk_split_kernel(const __grid_constant__ BulkParams bulk) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    const SplitParams& params = bulk.split;
    const int sets = static_cast<int>(blockDim.x) / 32 - 1, stages = Config::stages(sets);
    auto& shared = *reinterpret_cast<BulkSharedStorage<Config>*>(shared_bytes);
    if (threadIdx.x == 0) {
        if (ptx::shared_address(shared_bytes) % 1024 != 0) __trap();  // swizzling needs it
        init_kv_stages(bulk, shared, stages, Config::kSetsPerTile);
    }
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    SplitBlock block;
    if (!find_block(params, blockIdx.x, Config::kBlockM, block)) return;
    if (bulk.in_cluster) ptx::cluster_arrive();
    const BlockKeys keys(params, block, Config::kBlockM);
    const KeyRange tiles =
        split_tiles(keys.positions, Config::kTileKeys, sets / Config::kSetsPerTile,
                    static_cast<int>(blockIdx.y), params.num_splits);
    __syncthreads();  // the barriers are there

    BulkWarp<Config> warp;
    if (warp.set == sets) {
        if (!tiles.empty()) {
            load_kv_tiles<typename Config::Tile>(bulk, shared, block, keys.positions, tiles,
                                                 stages);
        }
    } else {
        if (!tiles.empty()) {
            consume_kv_tiles(shared, warp, params, block, keys, tiles);
        }
        const float of_values = Config::kFloat8 ? value_factor<Config>(params, block) : 1.0f;
        share_sums(shared, warp);
        ptx::bar_sync(1, 32 * sets);  // all sets are through with their tiles
        share_output<Config>(shared, warp, block.num_rows, of_values);
    }
    __syncthreads();  // the output of all sets is there
    if (bulk.in_cluster) {
        store_output_of_cluster<Config>(shared, sets, params, block);
    } else {
        store_rows<Config>(shared, sets, params, block);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
