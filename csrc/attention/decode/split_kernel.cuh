#pragma once

#include <cstdint>

#include "attention/decode/kv_pipeline.cuh"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/split_output.cuh"
#include "attention/sm80/warp_mma.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace decode {

/// A warp's place in its CTA and its state over the key loop.
template <class Config>
struct SplitWarp {
    int lane = 0;
    int set = 0;
    int row = 0;        // its first row in the block
    int column = 0;     // its first value column
    int first_key = 0;  // of those in a tile that it loads
    OnlineSoftmax<1> softmax;
    float acc_o[1][Config::kTilesD][4];

    __device__ SplitWarp() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int warp_in_set = warp % Config::kSetWarps;
        lane = static_cast<int>(threadIdx.x) % 32;
        set = warp / Config::kSetWarps;
        row = warp_in_set % Config::kTile.warps_m * 16;
        column = warp_in_set / Config::kTile.warps_m * Config::kColumnsPerWarp;
        first_key = warp_in_set * Config::kKeysPerWarp;
        sm80::clear(acc_o);
    }
};

/// Starts the copy of the block's query rows; the caller commits.
template <class Config>
__device__ __forceinline__ void load_queries(SplitSharedStorage<Config>& shared,
                                             const KvCacheAttentionParams& params,
                                             const SplitBlock& block) {
    const AttentionProblem& problem = params.problem;
    constexpr int kUnits = Config::kHeadDim / 8;
    const uint32_t sQ = ptx::shared_address(shared.q);
    const uint16_t* q = static_cast<const uint16_t*>(params.q);
    const int units = problem.head_dim / 8;
    const int64_t batch = problem.is_packed() ? 0 : block.batch;
    const int64_t first_row = problem.is_packed() ? block.row_q : 0;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Config::kBlockM * kUnits;
         i += Config::kThreads) {
        const int row = i / kUnits, unit = i % kUnits;
        const bool exists = row < block.num_rows && unit < units;
        const PackedRow packed = block.packed_row(exists ? row : 0);
        ptx::cp_async_16(
            sQ + static_cast<uint32_t>((row * Config::kPitch + unit * 8) * 2),
            q + tensor_offset(params.q_strides, batch, first_row + packed.row, packed.head) +
                unit * 8,
            exists ? 16 : 0);
    }
}

/// O += softmax(Q K^T) V over the set's tiles in [tiles.begin, tiles.end): every kSets-th one. Q is
/// on its way.
template <class Config>
__device__ __forceinline__ void consume_kv_tiles(SplitSharedStorage<Config>& shared,
                                                 SplitWarp<Config>& warp,
                                                 KvPipeline<Config>& pipeline, KvRows<Config>& kv,
                                                 const KeyRange& tiles, const KeyRange& full,
                                                 const PackedRows& rows, float scale_log2,
                                                 bool values_in_keys) {
    using Element = typename Config::Element;
    constexpr int kSteps = Config::kHeadDim / 16;
    constexpr int kTileKeys = Config::kTileKeys;
    constexpr sm80::Layout kInner = sm80::Layout::kContractionInner;
    constexpr sm80::Layout kOuter = sm80::Layout::kContractionOuter;

    int next = tiles.begin + warp.set;  // the tile to load
    const auto look_up_next = [&] {
        next += Config::kSets;
        if (next < tiles.end) kv.look_up(next);
    };

    // All slots but one are on their way from here on: half of them keys, or all.
    if (next < tiles.end) kv.look_up(next);
    const int ahead = values_in_keys ? Config::kSlots - 1 : (Config::kSlots - 1) / 2;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
        pipeline.load_keys(kv, next < tiles.end);
        if (!values_in_keys) pipeline.load_values(kv, next < tiles.end);
        look_up_next();
    }
    pipeline.wait_before_ring();
    __syncthreads();  // Q is there

    const uint32_t q_base = sm80::a_base<kInner, Config::kPitch>(
        ptx::shared_address(&shared.q[warp.row * Config::kPitch]), warp.lane);
    uint32_t q_fragments[Config::kQInRegisters ? kSteps : 1][1][4];
    if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            sm80::load_a<kInner, Config::kPitch>(q_fragments[k][0], q_base, 0, k);
        }
    }

#pragma unroll 1
    for (int tile = tiles.begin + warp.set; tile < tiles.end; tile += Config::kSets) {
        pipeline.wait_free();
        pipeline.load_keys(kv, next < tiles.end);
        pipeline.wait_full();

        // S = Q K^T
        float acc_s[1][Config::kTilesN][4];
        sm80::clear(acc_s);
        const uint32_t k_base =
            sm80::b_base<kInner, Config::kPitch>(pipeline.read_slot(), warp.lane);
        if constexpr (Config::kQInRegisters) {
            sm80::gemm_from_fragments<Element, Config::kPitch>(acc_s, q_fragments, k_base);
        } else {
            sm80::gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, kSteps>(
                acc_s, q_base, k_base);
        }

        // P = exp2(S * scale_log2 - row_max), in place; older output shrinks by the same factor
        const int first_key = tile * kTileKeys, key = first_key + 2 * (warp.lane % 4);
        if (rows.terms.transforms()) rows.apply_terms(acc_s, key);
        if (first_key < full.begin || first_key + kTileKeys > full.end) {
            rows.apply_mask(acc_s, key);
        }
        warp.softmax.template update</*kGuard=*/true>(acc_s, warp.acc_o, scale_log2, [](int) {});

        // O += P V
        if (!values_in_keys) {
            pipeline.next_read();
            pipeline.wait_free();
            pipeline.load_values(kv, next < tiles.end);
            pipeline.wait_full();
        }
        look_up_next();
        const uint32_t v_base = sm80::b_base<kOuter, Config::kPitch>(
            pipeline.read_slot() + static_cast<uint32_t>(warp.column * 2), warp.lane);
        sm80::gemm_from_registers<Element, kOuter, Config::kPitch>(warp.acc_o, acc_s, v_base);
        pipeline.next_read();
    }
    pipeline.finish();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2)
    split_kernel(const __grid_constant__ KvCacheAttentionParams params,
                 const __grid_constant__ SplitPlan plan) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<SplitSharedStorage<Config>*>(shared_bytes);
    const AttentionProblem& problem = params.problem;

    SplitBlock block;
    if (!find_block(params, plan, blockIdx.x, static_cast<int>(blockIdx.y), Config::kBlockM,
                    block)) {
        return;
    }
    const Mask mask{block.seqlen_q, block.seqlen_k, problem.window_left, problem.window_right};
    const int count = min(block.num_rows, Config::kBlockM);
    const int first = block.packed_row(0).row, last = block.packed_row(count - 1).row;
    const KeyRange keys = KeyRange::of(mask.keys(first, last + 1));
    const KeyRange full{static_cast<int>(mask.keys_of_row(last).begin),
                        static_cast<int>(mask.keys_of_row(first).end)};
    const KeyRange tiles =
        split_tiles(keys, Config::kTileKeys, Config::kSets, block.split, plan.num_splits);

    SplitWarp<Config> warp;
    const PackedRows rows(problem, block, mask, warp.row + warp.lane / 4);
    const float scale_log2 = rows.terms.transforms() ? kLog2E : problem.softmax_scale * kLog2E;
    if (!tiles.empty()) {
        load_queries(shared, params, block);
        ptx::cp_async_commit_group();
        const bool values_in_keys = Config::kMayShareRows && params.k_cache == params.v_cache &&
                                    params.cache.k_strides.batch == params.cache.v_strides.batch &&
                                    params.cache.k_strides.row == params.cache.v_strides.row &&
                                    params.cache.k_strides.head == params.cache.v_strides.head;
        KvPipeline<Config> pipeline(shared, warp.set, params);
        KvRows<Config> kv(params, block, keys, warp.first_key);
        consume_kv_tiles(shared, warp, pipeline, kv, tiles, full, rows, scale_log2, values_in_keys);
    }
    store_output(shared, warp, params, plan, block, scale_log2);
}

}  // namespace decode
}  // namespace flash_attn_norm
