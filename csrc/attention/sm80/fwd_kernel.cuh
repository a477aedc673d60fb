#pragma once

#include <cstdint>

#include "attention/dropout.h"
#include "attention/online_softmax.cuh"
#include "attention/params.h"
#include "attention/scores.cuh"
#include "attention/sm80/bias_tile.cuh"
#include "attention/sm80/config.h"
#include "attention/sm80/fwd_epilogue.cuh"
#include "attention/tile_copy.cuh"
#include "attention/tile_scheduler.h"
#include "attention/warp_mma.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace sm80 {

template <class Config>
using KeyLoader = TileLoader<Config::kBlockN, Config::kHeadDim, Config::kThreads>;
template <class Config>
using ValueLoader = TileLoader<Config::kBlockN, Config::kHeadDimV, Config::kThreads>;
template <class Config>
using FwdBiasTile =
    BiasTile<typename Config::Element, Config::kBlockM, Config::kBlockN, Config::kThreads>;

/// Adds the bias to a warp's scores; (row, key) is this lane's first one. See BiasTile about
/// `tile`.
template <class Config>
__device__ __forceinline__ void add_bias(float (&acc_s)[Config::kTilesM][Config::kTilesN][4],
                                         const FwdWarp<Config>& warp, const Bias& bias,
                                         const unsigned char* tile, int row, int key) {
#pragma unroll
    for (int m = 0; m < Config::kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int down = 16 * m + 8 * r;
            float values[Config::kTilesN][2];
            FwdBiasTile<Config>::read_row(values, bias, tile, warp.row + down, 2 * (warp.lane % 4),
                                          row + down, key);
#pragma unroll
            for (int n = 0; n < Config::kTilesN; ++n) {
                acc_s[m][n][2 * r] += values[n][0];
                acc_s[m][n][2 * r + 1] += values[n][1];
            }
        }
    }
}

/// Scores to probabilities, in place; rescales the output. See OnlineSoftmax about `between`.
template <class Config, class Between>
__device__ __forceinline__ void softmax_step(FwdWarp<Config>& warp,
                                             float (&acc_s)[Config::kTilesM][Config::kTilesN][4],
                                             const ScoreTerms& terms,
                                             const unsigned char* bias_tile,
                                             const RowBounds& bounds, float scale_log2, int row,
                                             int key, bool masked, Between&& between) {
    if constexpr (Config::kGeneral) {
        if (terms.transforms()) terms.apply(acc_s, row, key);
        if (terms.bias.exists()) add_bias<Config>(acc_s, warp, terms.bias, bias_tile, row, key);
    }
    if (masked) {
        apply_mask(acc_s, row, key, bounds);
        warp.softmax.template update</*kGuard=*/true, /*kAnyRange=*/Config::kGeneral>(
            acc_s, warp.acc_o, scale_log2, between);
    } else {
        warp.softmax.template update</*kGuard=*/Config::kGeneral, /*kAnyRange=*/Config::kGeneral>(
            acc_s, warp.acc_o, scale_log2, between);
    }
}

/// O += softmax(Q K^T) V over the key blocks of `range`, right to left: under a causal mask only
/// the first ones cross the diagonal. Q and the first K tile are on their way; `keys` and `values`
/// stand at the first row of the K tile after it and of its V tile. The bias' tiles come with V's
/// if `bias_unit` > 0.
template <class Config>
__device__ __forceinline__ void consume_kv_tiles(FwdSharedStorage<Config>& shared,
                                                 FwdWarp<Config>& warp, KeyLoader<Config>& keys,
                                                 ValueLoader<Config>& values,
                                                 const BlockRange& range, const RowBounds& bounds,
                                                 const ScoreTerms& terms, const Dropout& dropout,
                                                 float scale_log2, int m_block, int bias_unit) {
    using Element = typename Config::Element;
    constexpr int kSteps = Config::kHeadDim / 16;
    constexpr Layout kInner = Layout::kContractionInner, kOuter = Layout::kContractionOuter;
    constexpr int kSlots = kSteps * Config::kTilesN / 2;

    const int first_row = warp.row - warp.lane / 4;
    const uint32_t sK = ptx::shared_address(shared.k), sV = ptx::shared_address(shared.v);
    const uint32_t q_base = a_base<kInner, Config::kPitch>(
        ptx::shared_address(&shared.q[first_row * Config::kPitch]), warp.lane);
    const uint32_t k_base = b_base<kInner, Config::kPitch>(sK, warp.lane);
    const uint32_t v_base =
        b_base<kOuter, Config::kPitchV>(sV + static_cast<uint32_t>(warp.column * 2), warp.lane);
    const unsigned char* bias_tile =
        bias_unit > 0 ? reinterpret_cast<const unsigned char*>(&shared + 1) : nullptr;
    uint32_t q_fragments[Config::kQInRegisters ? kSteps : 1][Config::kTilesM][4];

#pragma unroll 1
    for (int n_block = range.end - 1; n_block >= range.begin; --n_block) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // K is there, the last V is free

        // S = Q K^T, while V starts
        const auto load_values = [&](int slot) {
            spread<ValueLoader<Config>::kSteps, (kSlots + 1) / 2>(
                slot, [&](int i) { values.step(i, sV); });
        };
        values.begin_tile(bounds.seqlen_k - n_block * Config::kBlockN);
        if constexpr (Config::kGeneral) {
            if (bias_unit > 0) {
                FwdBiasTile<Config>::load(ptx::shared_address(bias_tile), terms.bias, bias_unit,
                                          m_block * Config::kBlockM, n_block * Config::kBlockN);
            }
        }
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
            gemm_from_fragments<Element, Config::kPitch>(acc_s, q_fragments, k_base, load_values);
        } else {
            gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, kSteps>(
                acc_s, q_base, k_base, load_values);
        }
        ptx::cp_async_commit_group();
        values.to_previous_tile();
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // V is there, K is free

        // P = exp2(S * scale_log2 - row_max), in place, while the next K starts; older output
        // shrinks by the same factor
        const int row = m_block * Config::kBlockM + warp.row;
        const int key = n_block * Config::kBlockN + 2 * (warp.lane % 4);
        keys.begin_tile(n_block > range.begin ? Config::kBlockN : 0);  // after the last: no rows
        softmax_step(warp, acc_s, terms, bias_tile, bounds, scale_log2, row, key,
                     range.masked(n_block), [&](int slot) {
                         spread<KeyLoader<Config>::kSteps, 2 * Config::kTilesM>(
                             slot, [&](int i) { keys.step(i, sK); });
                     });
        ptx::cp_async_commit_group();
        keys.to_previous_tile();
        if constexpr (Config::kGeneral) {
            if (dropout.drop_below > 0) {
                for_each_dropout(acc_s, row, key, dropout, [](float& p, bool keep) {
                    if (!keep) p = 0.0f;
                });
            }
        }

        // O += P V
        gemm_from_registers<Element, kOuter, Config::kPitchV>(warp.acc_o, acc_s, v_base);
    }
    ptx::cp_async_wait_group<0>();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    fwd_kernel(const __grid_constant__ AttentionFwdParams params, const int bias_unit) {
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
        const int kv_head = place.head / problem.group_size();
        const int64_t first_key = int64_t{range.end - 1} * Config::kBlockN;
        KeyLoader<Config> keys(
            static_cast<const uint16_t*>(params.k) +
                tensor_offset(params.k_strides, info.batch, info.row_k + first_key, kv_head),
            params.k_strides.row, problem.head_dim / 8);
        ValueLoader<Config> values(
            static_cast<const uint16_t*>(params.v) +
                tensor_offset(params.v_strides, info.batch, info.row_k + first_key, kv_head),
            params.v_strides.row, problem.head_dim_v / 8);
        load_tile<Config::kBlockM, Config::kHeadDim, Config::kThreads>(
            ptx::shared_address(shared.q),
            static_cast<const uint16_t*>(params.q) +
                tensor_offset(params.q_strides, info.batch, info.row_q + first_row, place.head),
            params.q_strides.row, rows, problem.head_dim / 8);
        keys.begin_tile(static_cast<int>(info.seqlen_k - first_key));
#pragma unroll
        for (int i = 0; i < keys.kSteps; ++i) keys.step(i, ptx::shared_address(shared.k));
        keys.to_previous_tile();
        ptx::cp_async_commit_group();
        consume_kv_tiles(shared, warp, keys, values, range, RowBounds::make(mask), terms, dropout,
                         scale_log2, place.block, bias_unit);
    }
    store_output(shared, warp, params, place, scale_log2);
}

}  // namespace sm80
}  // namespace flash_attn_norm
