#pragma once

#include <cstdint>

#include "attention/decode/float8_products.cuh"
#include "attention/decode/kv_pipeline.cuh"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/queries.cuh"
#include "attention/decode/split_output.cuh"
#include "attention/decode/warp_products.cuh"
#include "attention/tile_copy.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// A warp's place in its CTA and its state over the key loop.
template <class Config>
struct SplitWarp {
    int lane = 0;
    int sets = 1;       // of the CTA
    int set = 0;        // its own
    int row = 0;        // its first row in the block
    int column = 0;     // its first value column
    int first_key = 0;  // of those in a tile that it loads
    OnlineSoftmax<1> softmax;
    float acc_o[1][Config::kTilesD][4];

    __device__ __forceinline__ SplitWarp() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int warp_in_set = warp % Config::kSetWarps;
        lane = static_cast<int>(threadIdx.x) % 32;
        if constexpr (Config::kMaxSets > 1) sets = static_cast<int>(blockDim.x) / 32;
        set = warp / Config::kSetWarps;
        row = warp_in_set % Config::kTile.warps_m * 16;
        column = warp_in_set / Config::kTile.warps_m * Config::kColumnsPerWarp;
        first_key = warp_in_set * Config::kKeysPerWarp;
        clear(acc_o);
    }
};

/// A warp's 16 rows of Q, in registers where there is room, and its products with keys.
template <class Config>
struct SplitQueries {
    static constexpr int kSteps = Config::kHeadDim / 16;
    uint32_t base;  // of its fragments in shared memory
    uint32_t fragments[Config::kQInRegisters ? kSteps : 1][1][4];
    float score_factors[2] = {1.0f, 1.0f};  // float8: of this lane's rows

    __device__ __forceinline__ SplitQueries(SplitSharedStorage<Config>& shared,
                                            const SplitWarp<Config>& warp)
        : base(a_base<Layout::kContractionInner, Config::kPitch>(
              ptx::shared_address(&shared.q[warp.row * Config::kPitch]), warp.lane)) {
        if constexpr (Config::kQInRegisters) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                load_a<Layout::kContractionInner, Config::kPitch>(fragments[k][0], base, 0, k);
            }
        }
        if constexpr (Config::kFloat8) {
            score_factors[0] = shared.score_factor[warp.row + warp.lane / 4];
            score_factors[1] = shared.score_factor[warp.row + warp.lane / 4 + 8];
        }
    }

    __device__ __forceinline__ void load(uint32_t (&a)[4], int k) const {
        if constexpr (Config::kQInRegisters) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[k][0][i];
        } else {
            load_a<Layout::kContractionInner, Config::kPitch>(a, base, 0, k);
        }
    }

    /// acc_s += Q K^T for the tile at `keys`; between() as in gemm, kSlots times.
    static constexpr int kSlots = kSteps * Config::kTilesN / (Config::kFloat8 ? 4 : 2);
    template <class Between>
    __device__ __forceinline__ void multiply(float (&acc_s)[1][Config::kTilesN][4], uint32_t keys,
                                             Between&& between) const {
        using Element = typename Config::Element;
        constexpr Layout kInner = Layout::kContractionInner;
        if constexpr (Config::kFloat8) {
            multiply_float8_keys<typename Config::Arch, kSteps>(
                acc_s, [&](uint32_t (&a)[4], int k) { load(a, k); },
                [&](uint32_t (&b)[4], int n, int pair) {
                    load_b<kInner, Config::kKvPitch>(b, keys, n, pair);
                },
                between);
            scale_scores(acc_s, score_factors);
        } else if constexpr (Config::kQInRegisters) {
            gemm_from_fragments<Element, Config::kPitch>(acc_s, fragments, keys, between);
        } else {
            gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, kSteps>(acc_s, base, keys,
                                                                                  between);
        }
    }
};

/// acc_o += P V for the tile at `values`; between() as in gemm, kSlots times.
template <class Config>
struct SplitValues {
    static constexpr int kSlots = Config::kTilesN / 2 * Config::kTilesD / (Config::kFloat8 ? 4 : 2);
    template <class Between>
    __device__ __forceinline__ static void multiply(float (&acc_o)[1][Config::kTilesD][4],
                                                    const float (&p)[1][Config::kTilesN][4],
                                                    uint32_t values, Between&& between) {
        if constexpr (Config::kFloat8) {
            multiply_float8_values<typename Config::Arch>(
                acc_o, p,
                [&](uint32_t (&b)[4], int n, int k) {
                    load_b<Layout::kContractionOuter, Config::kKvPitch>(b, values, n, k);
                },
                between);
        } else {
            multiply_values<typename Config::Element, Config::kPitch>(acc_o, p, values, between);
        }
    }
};

/// O += softmax(Q K^T) V over the set's tiles of `tiles`: every sets-th one.
template <class Config>
__device__ __forceinline__ void consume_kv_tiles(SplitSharedStorage<Config>& shared,
                                                 SplitWarp<Config>& warp, const SplitParams& params,
                                                 const SplitBlock& block, const BlockKeys& keys,
                                                 const KeyRange& tiles) {
    constexpr Layout kInner = Layout::kContractionInner;
    constexpr Layout kOuter = Layout::kContractionOuter;
    using KeyCopy = typename KvPipeline<Config>::KeyCopy;
    using ValueCopy = typename KvPipeline<Config>::ValueCopy;
    const bool values_in_keys = Config::kMayShareRows && params.values_in_keys;

    KvRows<Config> kv(params, block, keys.seen, warp.first_key);
    KvPipeline<Config> pipeline(params, shared.ring(warp.set));
    int next = tiles.begin + warp.set;  // the tile to load
    const auto look_up_next = [&] {
        next += warp.sets;
        if (next < tiles.end) kv.look_up(params, next);
    };

    // All slots but one are on their way from here on: half of them keys, or all.
    if (next < tiles.end) kv.look_up(params, next);
    const int ahead = values_in_keys ? Config::kSlots - 1 : (Config::kSlots - 1) / 2;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
        copy_tile(pipeline.begin_keys(kv, next < tiles.end));
        if (!values_in_keys) copy_tile(pipeline.begin_values(kv, next < tiles.end));
        look_up_next();
    }
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const auto q_place = [&](int row, int unit) {
        return &shared.q[row * Config::kPitch + unit * 8];
    };
    if constexpr (Config::kFloat8) {
        load_float8_queries<Config::kHeadDim, ColumnOrder::kEvenFirst>(
            params, block, Config::kBlockM, thread / 32, threads / 32,
            key_factor<Config>(params, block), shared.score_factor, q_place);
    } else {
        load_queries<Config::kHeadDim>(params, block, Config::kBlockM, thread, threads, q_place);
    }
    const PackedRows rows(params, block, keys.band, warp.row + warp.lane / 4);
    const float scale_log2 = rows.scale_log2();
    __syncthreads();  // Q is there

    const SplitQueries<Config> queries(shared, warp);

#pragma unroll 1
    for (int tile = tiles.begin + warp.set; tile < tiles.end; tile += warp.sets) {
        pipeline.wait();

        // S = Q K^T, and among its products the copies of K for a tile to come
        const KeyCopy next_keys = pipeline.begin_keys(kv, next < tiles.end);
        const auto load_keys = [&](int slot) {
            spread<KeyCopy::kSteps, SplitQueries<Config>::kSlots>(
                slot, [&](int i) { next_keys.step(i); });
        };
        float acc_s[1][Config::kTilesN][4];
        clear(acc_s);
        const uint32_t k_base = b_base<kInner, Config::kKvPitch>(pipeline.read_slot(), warp.lane);
        queries.multiply(acc_s, k_base, load_keys);
        ptx::cp_async_commit_group();

        // P = exp2(S * scale_log2 - row_max), in place; older output shrinks by the same factor
        const int first_key = tile * Config::kTileKeys, key = first_key + 2 * (warp.lane % 4);
        if (rows.has_terms) rows.apply_terms(acc_s, key);
        if (first_key < keys.full.begin || first_key + Config::kTileKeys > keys.full.end) {
            rows.apply_mask(acc_s, key);
        }
        update_softmax(warp.softmax, acc_s, warp.acc_o, scale_log2);

        // O += P V, and among its products the copies of V
        if (!values_in_keys) {
            pipeline.next_read();
            pipeline.wait();
        }
        const ValueCopy next_values =
            pipeline.begin_values(kv, !values_in_keys && next < tiles.end);
        const auto load_values = [&](int slot) {
            spread<ValueCopy::kSteps, SplitValues<Config>::kSlots>(
                slot, [&](int i) { next_values.step(i); });
        };
        look_up_next();
        const uint32_t v_base = b_base<kOuter, Config::kKvPitch>(
            pipeline.read_slot() +
                static_cast<uint32_t>(warp.column * sizeof(typename Config::CacheElement)),
            warp.lane);
        SplitValues<Config>::multiply(warp.acc_o, acc_s, v_base, load_values);
        if (!values_in_keys) ptx::cp_async_commit_group();
        pipeline.next_read();
    }
    // In base 2 from here on
    warp.softmax.row_max[0][0] = scaled_max(warp.softmax.row_max[0][0], scale_log2);
    warp.softmax.row_max[0][1] = scaled_max(warp.softmax.row_max[0][1], scale_log2);
}

template <class Config>
__global__ void __launch_bounds__(Config::threads(Config::kMaxSets), 1)
    split_kernel(const __grid_constant__ SplitParams params) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<SplitSharedStorage<Config>*>(shared_bytes);

    if constexpr (Config::Arch::kHasGridDependency) {
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }
    SplitBlock block;
    if (!find_block(params, blockIdx.x, Config::kBlockM, block)) return;
    const BlockKeys keys(params, block, Config::kBlockM);

    SplitWarp<Config> warp;
    const KeyRange tiles = split_tiles(keys.seen, Config::kTileKeys, warp.sets,
                                       static_cast<int>(blockIdx.y), params.num_splits);
    if (!tiles.empty()) {
        consume_kv_tiles(shared, warp, params, block, keys, tiles);
    }
    const float of_values = Config::kFloat8 ? value_factor<Config>(params, block) : 1.0f;
    share_sums(shared, warp);
    __syncthreads();  // the operands' tiles are free, too
    share_output<Config>(shared, warp, block.num_rows, of_values);
    __syncthreads();
    store_rows<Config>(shared, warp.sets, params, block);
}

}  // namespace decode
}  // namespace flash_attn_norm
