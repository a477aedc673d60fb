#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/scores.cuh"
#include "attention/sm80/config.h"
#include "attention/sm80/tile_copy.cuh"
#include "attention/sm80/warp_mma.cuh"
#include "attention/tile_scheduler.h"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace sm80 {

/// One CTA's share of the forward pass: a block of query rows of one sequence and head.
struct FwdBlock {
    int64_t batch = 0;  // sequence
    int head = 0;
    int block = 0;
    SeqlenInfo info;

    /// False for a slot that no rows fall into.
    __device__ bool find(const AttentionProblem& problem, int block_m) {
        const BlockSlots slots = BlockSlots::queries(problem, block_m);
        const int64_t index = blockIdx.x;
        if (problem.is_packed()) {
            const int64_t count = slots.count();
            const int64_t slot = count - 1 - index % count;
            head = static_cast<int>(index / count);
            batch = slots.batch_of(slot);
            block = static_cast<int>(slot - slots.first_slot(batch));
        } else {
            // Blocks of one head are neighbours, so that they share its keys in the L2; the last
            // one, which sees most keys under a causal mask, comes first.
            const int64_t blocks = slots.blocks_per_entry();
            const int64_t batch_head = index / blocks;
            batch = batch_head / problem.num_heads_q;
            head = static_cast<int>(batch_head % problem.num_heads_q);
            block = static_cast<int>(blocks - 1 - index % blocks);
        }
        info = seqlen_info_or_uncovered(problem, batch, /*of_queries=*/true);
        return block >= 0 && int64_t{block} * block_m < info.seqlen_q;
    }
};

/// Addresses and sizes that the key loop needs.
struct KvTiles {
    const uint16_t* k = nullptr;  // row 0 of the sequence, this head
    const uint16_t* v = nullptr;
    int64_t k_row_stride = 0;
    int64_t v_row_stride = 0;
    int seqlen_k = 0;
    int k_units = 0;  // true head dims in units of 8 columns
    int v_units = 0;

    template <class Config>
    __device__ __forceinline__ void load_k(uint32_t destination, int n_block) const {
        const int row = n_block * Config::kBlockN;
        load_tile<Config::kBlockN, Config::kHeadDim, Config::kThreads>(
            destination, k + row * k_row_stride, k_row_stride, seqlen_k - row, k_units);
    }
    template <class Config>
    __device__ __forceinline__ void load_v(uint32_t destination, int n_block) const {
        const int row = n_block * Config::kBlockN;
        load_tile<Config::kBlockN, Config::kHeadDimV, Config::kThreads>(
            destination, v + row * v_row_stride, v_row_stride, seqlen_k - row, v_units);
    }
};

/// A warp's place in the tile and its state over the key loop.
template <class Config>
struct FwdWarp {
    int lane = 0;
    int row = 0;     // this lane's first row in the block
    int column = 0;  // the warp's first value column
    OnlineSoftmax<Config::kTilesM> softmax;
    float acc_o[Config::kTilesM][Config::kTilesD][4];

    __device__ FwdWarp() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        lane = static_cast<int>(threadIdx.x) % 32;
        row = (warp % Config::kWarpsM) * Config::kRowsPerWarp + lane / 4;
        column = (warp / Config::kWarpsM) * Config::kColumnsPerWarp;
        clear(acc_o);
    }
};

/// Scores to probabilities, in place; rescales the output.
template <class Config>
__device__ __forceinline__ void softmax_step(FwdWarp<Config>& warp,
                                             float (&acc_s)[Config::kTilesM][Config::kTilesN][4],
                                             const ScoreTerms& terms, const RowBounds& bounds,
                                             float scale_log2, int row, int key, bool masked) {
    if constexpr (Config::kGeneral) {
        if (terms.transforms()) terms.apply(acc_s, row, key);
    }
    if (masked) {
        apply_mask(acc_s, row, key, bounds);
        warp.softmax.template update</*kGuard=*/true>(acc_s, warp.acc_o, scale_log2);
    } else {
        warp.softmax.template update</*kGuard=*/Config::kGeneral>(acc_s, warp.acc_o, scale_log2);
    }
}

/// O += softmax(Q K^T) V over the key blocks of `range`, right to left: under a causal mask only
/// the first ones cross the diagonal.
template <class Config>
__device__ __forceinline__ void consume_kv_tiles(FwdSharedStorage<Config>& shared,
                                                 FwdWarp<Config>& warp, const KvTiles& tiles,
                                                 const BlockRange& range, const RowBounds& bounds,
                                                 const ScoreTerms& terms, const Dropout& dropout,
                                                 float scale_log2, int m_block, int num_stages) {
    using Element = typename Config::Element;
    using Stage = typename FwdSharedStorage<Config>::Stage;
    constexpr int kSteps = Config::kHeadDim / 16;
    constexpr Layout kInner = Layout::kContractionInner, kOuter = Layout::kContractionOuter;

    const int first_row = warp.row - warp.lane / 4;
    const uint32_t q_base = a_base<kInner, Config::kPitch>(
        ptx::shared_address(&shared.q[first_row * Config::kPitch]), warp.lane);
    const uint32_t first_k = ptx::shared_address(shared.stages[0].k);
    const uint32_t first_v = ptx::shared_address(shared.stages[0].v);
    uint32_t q_fragments[Config::kQInRegisters ? kSteps : 1][Config::kTilesM][4];
    uint32_t stage = 0;  // byte offset of the stage in use
    const bool two_stages = num_stages == 2;

    for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // K (two stages: and V) of this block is there, the other stage is free
        const uint32_t sK = first_k + stage, sV = first_v + stage;
        if (two_stages) {
            stage = stage == 0 ? static_cast<uint32_t>(sizeof(Stage)) : 0;
            if (n_block > range.begin) {
                tiles.load_k<Config>(first_k + stage, n_block - 1);
                tiles.load_v<Config>(first_v + stage, n_block - 1);
            }
        } else {
            tiles.load_v<Config>(sV, n_block);
        }
        ptx::cp_async_commit_group();

        // S = Q K^T
        float acc_s[Config::kTilesM][Config::kTilesN][4];
        clear(acc_s);
        if constexpr (Config::kQInRegisters) {
            if (n_block == range.end - 1) {
#pragma unroll
                for (int k = 0; k < kSteps; ++k) {
#pragma unroll
                    for (int m = 0; m < Config::kTilesM; ++m) {
                        load_a<kInner, Config::kPitch>(q_fragments[k][m], q_base, m, k);
                    }
                }
            }
            gemm_from_fragments<Element, Config::kPitch>(
                acc_s, q_fragments, b_base<kInner, Config::kPitch>(sK, warp.lane));
        } else {
            gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, kSteps>(
                acc_s, q_base, b_base<kInner, Config::kPitch>(sK, warp.lane));
        }
        if (!two_stages) {
            ptx::cp_async_wait_group<0>();
            __syncthreads();  // V is there, K is free
            if (n_block > range.begin) tiles.load_k<Config>(sK, n_block - 1);
            ptx::cp_async_commit_group();
        }

        // P = exp2(S * scale_log2 - row_max), in place; older output shrinks by the same factor
        const int row = m_block * Config::kBlockM + warp.row;
        const int key = n_block * Config::kBlockN + 2 * (warp.lane % 4);
        softmax_step(warp, acc_s, terms, bounds, scale_log2, row, key, range.masked(n_block));
        if constexpr (Config::kGeneral) {
            if (dropout.drop_below > 0) {
                for_each_dropout(acc_s, row, key, dropout, [](float& p, bool keep) {
                    if (!keep) p = 0.0f;
                });
            }
        }

        // O += P V
        gemm_from_registers<Element, kOuter, Config::kPitchV>(
            warp.acc_o, acc_s,
            b_base<kOuter, Config::kPitchV>(sV + static_cast<uint32_t>(warp.column * 2),
                                            warp.lane));
    }
}

/// Normalises, writes the LSE, and stores the output through shared memory.
template <class Config>
__device__ __forceinline__ void store_output(FwdSharedStorage<Config>& shared,
                                             FwdWarp<Config>& warp,
                                             const AttentionFwdParams& params,
                                             const FwdBlock& place, float scale_log2) {
    const AttentionProblem& problem = params.problem;
    const int first_row = place.block * Config::kBlockM;
    const int rows = static_cast<int>(place.info.seqlen_q) - first_row;
    // Rows that no sequence covers have no sink either.
    const float sink = problem.s_aux == nullptr || place.batch == problem.batch_size
                           ? negative_infinity()
                           : load_as_float(problem.s_aux, problem.s_aux_dtype, place.head);
    const float keep_scale = 1.0f / (1.0f - problem.dropout_p);
    float* lse = params.softmax_lse + lse_offset(problem, place.info, place.head) + first_row;
#pragma unroll
    for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float normalizer;
            const float row_lse = warp.softmax.finish(m, r, scale_log2, sink, normalizer);
            normalizer *= keep_scale;
            const int row = warp.row + 16 * m + 8 * r;
            if (warp.lane % 4 == 0 && warp.column == 0 && row < rows) lse[row] = row_lse;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                warp.acc_o[m][d][2 * r] *= normalizer;
                warp.acc_o[m][d][2 * r + 1] *= normalizer;
            }
        }
    }
    __syncthreads();  // every warp has read Q
    accumulator_to_tile<typename Config::Element, Config::kPitchV>(
        &shared.q[(warp.row - warp.lane / 4) * Config::kPitchV + warp.column], warp.acc_o,
        warp.lane);
    __syncthreads();
    const int64_t row_stride = int64_t{problem.num_heads_q} * problem.head_dim_v;
    const int64_t row = place.info.batch * problem.seqlen_q + place.info.row_q + first_row;
    uint16_t* out = static_cast<uint16_t*>(params.out) + row * row_stride +
                    int64_t{place.head} * problem.head_dim_v;
    store_tile<Config::kBlockM, Config::kHeadDimV, Config::kThreads>(out, row_stride, shared.q,
                                                                     rows, problem.head_dim_v / 8);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    fwd_kernel(const __grid_constant__ AttentionFwdParams params, const int num_stages) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    auto& shared = *reinterpret_cast<FwdSharedStorage<Config>*>(shared_bytes);
    const AttentionProblem& problem = params.problem;

    FwdBlock place;
    if (!place.find(problem, Config::kBlockM)) return;
    const SeqlenInfo& info = place.info;
    const int first_row = place.block * Config::kBlockM;
    const int rows = static_cast<int>(info.seqlen_q) - first_row;
    const Mask mask{info.seqlen_q, info.seqlen_k, problem.window_left, problem.window_right};
    const BlockRange range =
        key_blocks(mask, first_row, first_row + (rows < Config::kBlockM ? rows : Config::kBlockM),
                   Config::kBlockN);

    KvTiles tiles;
    const int kv_head = place.head / problem.group_size();
    tiles.k = static_cast<const uint16_t*>(params.k) +
              tensor_offset(params.k_strides, info.batch, info.row_k, kv_head);
    tiles.v = static_cast<const uint16_t*>(params.v) +
              tensor_offset(params.v_strides, info.batch, info.row_k, kv_head);
    tiles.k_row_stride = params.k_strides.row;
    tiles.v_row_stride = params.v_strides.row;
    tiles.seqlen_k = static_cast<int>(info.seqlen_k);
    tiles.k_units = problem.head_dim / 8;
    tiles.v_units = problem.head_dim_v / 8;

    float scale_log2 = problem.softmax_scale * kLog2E;
    ScoreTerms terms;
    Dropout dropout;
    if constexpr (Config::kGeneral) {
        terms = ScoreTerms::make(problem, info, place.batch, place.head);
        if (terms.transforms()) scale_log2 = kLog2E;
        if (problem.dropout_p > 0.0f) {
            dropout = Dropout::make(problem.rng_state, problem.dropout_p,
                                    place.batch * problem.num_heads_q + place.head);
        }
    }

    FwdWarp<Config> warp;
    if (range.begin < range.end) {
        const uint16_t* q =
            static_cast<const uint16_t*>(params.q) +
            tensor_offset(params.q_strides, info.batch, info.row_q + first_row, place.head);
        load_tile<Config::kBlockM, Config::kHeadDim, Config::kThreads>(
            ptx::shared_address(shared.q), q, params.q_strides.row, rows, problem.head_dim / 8);
        tiles.load_k<Config>(ptx::shared_address(shared.stages[0].k), range.end - 1);
        if (num_stages == 2) {
            tiles.load_v<Config>(ptx::shared_address(shared.stages[0].v), range.end - 1);
        }
        ptx::cp_async_commit_group();
        consume_kv_tiles(shared, warp, tiles, range, RowBounds::make(mask), terms, dropout,
                         scale_log2, place.block, num_stages);
    }
    store_output(shared, warp, params, place, scale_log2);
}

}  // namespace sm80
}  // namespace flash_attn_norm
