#pragma once

#include <cstdint>

#include "attention/scores.cuh"
#include "attention/sm80/bias_tile.cuh"
#include "attention/sm80/bwd_bias.cuh"
#include "attention/sm80/bwd_tiles.cuh"
#include "attention/warp_mma.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {
namespace sm80 {

constexpr Layout kInner = Layout::kContractionInner;
constexpr Layout kOuter = Layout::kContractionOuter;

/// exp2(score * scale_log2 - lse_log2), at most 1: of huge scores the LSE is so coarse that the
/// power might be inf.
__device__ __forceinline__ float probability(float score, float scale_log2, float lse_log2) {
    return ptx::ex2_approx(ptx::min_nan(fmaf(score, scale_log2, -lse_log2), 0.0f));
}

template <class Config>
using BwdBiasTile =
    BiasTile<typename Config::Element, Config::kBlockM, Config::kBlockN, Config::kThreads>;

/// S -> P, rounded into shared memory, and dP -> dS, in place, rounded into shared memory.
template <class Config>
__device__ __forceinline__ void score_gradients(
    BwdSharedStorage<Config>& shared, float (&acc_s)[Config::kTilesSM][Config::kTilesSN][4],
    float (&acc_dp)[Config::kTilesSM][Config::kTilesSN][4], float scale_log2, int parity,
    int tile_row, int tile_column) {
    using Element = typename Config::Element;
#pragma unroll
    for (int m = 0; m < Config::kTilesSM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = tile_row + 16 * m + 8 * r;
            const float lse = shared.lse_log2[parity][row];
            const float delta = shared.delta[parity][row];
            uint32_t* p_row =
                reinterpret_cast<uint32_t*>(&shared.p[row * Config::kPitchS + tile_column]);
            uint32_t* ds_row =
                reinterpret_cast<uint32_t*>(&shared.ds[row * Config::kPitchS + tile_column]);
#pragma unroll
            for (int n = 0; n < Config::kTilesSN; ++n) {
                const int e = 2 * r;
                const float p0 = probability(acc_s[m][n][e], scale_log2, lse);
                const float p1 = probability(acc_s[m][n][e + 1], scale_log2, lse);
                p_row[4 * n] = Element::pack(p0, p1);
                ds_row[4 * n] = Element::pack(p0 * (acc_dp[m][n][e] - delta),
                                              p1 * (acc_dp[m][n][e + 1] - delta));
            }
        }
    }
}

/// What rounding to the element type takes from x.
template <class Element>
__device__ __forceinline__ float lost_by_rounding(float x) {
    return x - Element::to_float(static_cast<uint16_t>(Element::pack(x, 0.0f)));
}

/// The same with score terms and dropout. Afterwards acc_dp holds d loss / d (scores after softcap)
/// and acc_s the slope of the softcap, 1 without one; dS in shared memory is their product.
/// takes_rest: shared memory gets what rounding takes from P and dS instead.
template <class Config>
__device__ __forceinline__ void score_gradients_general(
    BwdSharedStorage<Config>& shared, float (&acc_s)[Config::kTilesSM][Config::kTilesSN][4],
    float (&acc_dp)[Config::kTilesSM][Config::kTilesSN][4], const ScoreTerms& terms,
    const unsigned char* bias_tile, const Dropout& dropout, float keep_scale, bool takes_rest,
    int parity, int tile_row, int tile_column, int row, int key) {
    using Element = typename Config::Element;
    // Dropped entries are marked by a negative gradient of P that no other entry can have: -inf.
    if (dropout.drop_below > 0) {
        for_each_dropout(acc_dp, row, key, dropout, [&](float& dp, bool keep) {
            dp = keep ? dp * keep_scale : negative_infinity();
        });
    }
#pragma unroll
    for (int m = 0; m < Config::kTilesSM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int tile_i = tile_row + 16 * m + 8 * r;
            const float lse = shared.lse_log2[parity][tile_i];
            const float delta = shared.delta[parity][tile_i];
            float bias[Config::kTilesSN][2];
            if (terms.bias.exists()) {
                BwdBiasTile<Config>::read_row(bias, terms.bias, bias_tile, tile_i, tile_column,
                                              row + 16 * m + 8 * r, key);
            }
#pragma unroll
            for (int n = 0; n < Config::kTilesSN; ++n) {
                float p_kept[2], ds[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& s = acc_s[m][n][2 * r + e];
                    float& dp = acc_dp[m][n][2 * r + e];
                    float slope = 1.0f, score = s;
                    if (score != negative_infinity()) {  // masked
                        score = terms.score(s, row + 16 * m + 8 * r, key + 8 * n + e, slope);
                        if (terms.bias.exists()) score += bias[n][e];
                    }
                    const float p = probability(score, kLog2E, lse);
                    const bool dropped = dp == negative_infinity();
                    p_kept[e] = dropped ? 0.0f : p;
                    dp = p * ((dropped ? 0.0f : dp) - delta);
                    s = slope;
                    ds[e] = dp * slope;
                    if (takes_rest) {
                        p_kept[e] = lost_by_rounding<Element>(p_kept[e]);
                        ds[e] = lost_by_rounding<Element>(ds[e]);
                    }
                }
                const int offset = tile_i * Config::kPitchS + tile_column + 8 * n;
                *reinterpret_cast<uint32_t*>(&shared.p[offset]) =
                    Element::pack(p_kept[0], p_kept[1]);
                *reinterpret_cast<uint32_t*>(&shared.ds[offset]) = Element::pack(ds[0], ds[1]);
            }
        }
    }
}

/// The sums of one CTA, and where this warp's parts of each product lie.
template <class Config>
struct BwdWarp {
    static constexpr BwdTile kTile = Config::kTile;

    int lane, warp;
    int s_row, s_column;   // first query and key of the warp's scores
    int kv_row, kv_group;  // first key of the warp's part of dK and dV, its share of head dims
    int q_row, q_column;   // of dQ
    float acc_dk[Config::kTilesKvN][Config::kTilesKD][4];
    float acc_dv[Config::kTilesKvN][Config::kTilesVD][4];

    __device__ BwdWarp() {
        warp = static_cast<int>(threadIdx.x) / 32;
        lane = static_cast<int>(threadIdx.x) % 32;
        s_row = warp % kTile.warps_s_m * (Config::kTilesSM * 16);
        s_column = warp / kTile.warps_s_m * (Config::kTilesSN * 8);
        kv_row = warp % kTile.warps_kv_n * (Config::kTilesKvN * 16);
        kv_group = warp / kTile.warps_kv_n;
        q_row = warp % kTile.warps_q_m * (Config::kTilesQM * 16);
        q_column = warp / kTile.warps_q_m * (Config::kTilesQD * 8);
        clear(acc_dk);
        clear(acc_dv);
    }
};

/// The scores of one step and their gradients: fills shared.p and shared.ds. between(i) runs among
/// the products of S, see gemm.
template <class Config, class Between>
__device__ __forceinline__ void score_step(BwdSharedStorage<Config>& shared,
                                           const BwdWarp<Config>& warp, uint32_t q, uint32_t dout,
                                           const unsigned char* bias_tile, const BwdArgs& args,
                                           const BwdBlock& place, const QueryStep& step,
                                           const RowBounds& bounds, int parity, bool masked,
                                           Between&& between) {
    using Element = typename Config::Element;
    const AttentionProblem& problem = args.params.problem;
    const bool works = Config::kWarpsS == Config::kTile.warps || warp.warp < Config::kWarpsS;
    float acc_s[Config::kTilesSM][Config::kTilesSN][4];
    float acc_dp[Config::kTilesSM][Config::kTilesSN][4];
    const int tile_row = warp.s_row + warp.lane / 4;
    const int tile_column = warp.s_column + 2 * (warp.lane % 4);
    const int row = step.block * Config::kBlockM + tile_row;
    const int key = place.block * Config::kBlockN + tile_column;
    const bool takes_rest = Config::kGeneral && args.last_part != 0 && parity != 0;
    if (works) {
        // S = Q K^T, dP = dO V^T
        clear(acc_s);
        clear(acc_dp);
        gemm<Element, kInner, Config::kPitch, kInner, Config::kPitch, Config::kHeadDim / 16>(
            acc_s,
            a_base<kInner, Config::kPitch>(
                q + static_cast<uint32_t>(warp.s_row * Config::kPitch * 2), warp.lane),
            b_base<kInner, Config::kPitch>(
                ptx::shared_address(&shared.k[warp.s_column * Config::kPitch]), warp.lane),
            between);
        if (masked) apply_mask(acc_s, row, key, bounds);
        gemm<Element, kInner, Config::kPitchV, kInner, Config::kPitchV, Config::kHeadDimV / 16>(
            acc_dp,
            a_base<kInner, Config::kPitchV>(
                dout + static_cast<uint32_t>(warp.s_row * Config::kPitchV * 2), warp.lane),
            b_base<kInner, Config::kPitchV>(
                ptx::shared_address(&shared.v[warp.s_column * Config::kPitchV]), warp.lane));
        // P = exp2(S * scale_log2 - lse_log2), dS = P * (dP - delta)
        if constexpr (Config::kGeneral) {
            // Made here, not before the loop: they would occupy registers during the products.
            const ScoreTerms terms = ScoreTerms::make(problem, place.info, place.batch, step.head);
            Dropout dropout;
            if (problem.dropout_p > 0.0f) {
                dropout = Dropout::make(problem.rng_state, problem.dropout_p,
                                        place.batch * problem.num_heads_q + step.head);
            }
            score_gradients_general(shared, acc_s, acc_dp, terms, bias_tile, dropout,
                                    1.0f / (1.0f - problem.dropout_p), takes_rest, parity, tile_row,
                                    tile_column, row, key);
        } else {
            score_gradients(shared, acc_s, acc_dp, problem.softmax_scale * kLog2E, parity, tile_row,
                            tile_column);
        }
    }
    if constexpr (Config::kGeneral) {
        if (args.params.dattn_bias == nullptr || takes_rest) return;
        const BiasGradient bias =
            BiasGradient::make(args.params, args.workspace, place.info, place.batch, step.head,
                               place.block, Config::kBlockM, Config::kBlockN);
        if (bias.columns != nullptr && works) {
            BiasGradient::add_columns(acc_dp, shared.bias_sum[warp.warp % Config::kWarpsSM],
                                      tile_column, warp.lane);
        } else if (bias.rows != nullptr) {
            int* turn = bias.turns == nullptr ? nullptr
                                              : bias.turns + int64_t{step.block} * bias.turn_stride;
            if (turn != nullptr) wait_for_turn(turn, bias.turn);
            if (works) bias.template put_rows<Element>(acc_dp, row, key);
            if (turn != nullptr) pass_turn(turn);
        }
    }
}

}  // namespace sm80
}  // namespace flash_attn_norm
