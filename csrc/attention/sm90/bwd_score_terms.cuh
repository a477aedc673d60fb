#pragma once

#include <cstdint>

#include "attention/online_softmax.cuh"
#include "attention/sm90/bwd_block.cuh"
#include "ptx/math.cuh"

namespace flash_attn_norm {
namespace sm90 {

/// Softcap and ALiBi (see AttentionProblem), for the kernels that have their code.
struct BwdScoreTerms {
    float softmax_scale = 1.0f;
    float softcap = 0.0f;
    float alibi_slope = 0.0f;
    int first_diagonal = 0;  // ALiBi counts |row + seqlen_k - seqlen_q - key| in the sequence

    __device__ __forceinline__ static BwdScoreTerms make(const AttentionProblem& problem,
                                                         const BwdTile& tile, int head) {
        BwdScoreTerms terms;
        terms.softmax_scale = problem.softmax_scale;
        terms.softcap = problem.softcap;
        if (problem.alibi_slopes != nullptr) {
            terms.alibi_slope =
                problem.alibi_slopes[tile.sequence * problem.alibi_batch_stride + head];
        }
        terms.first_diagonal = tile.shift - tile.first_key;
        return terms;
    }

    /// P of the score of row `row` of the sequence and key `key` of the tile, and the weight of
    /// dP - delta in dS / d(softmax_scale * dot); dot is -inf where it is masked.
    __device__ __forceinline__ void probability(float dot, int row, int key, float lse_log2,
                                                float& p, float& weight) const {
        float score = softmax_scale * dot, slope = 1.0f;
        if (softcap > 0.0f) {
            // tanh by the exponential, as in the forward pass: tanh.approx is good for 2^-11 only.
            const float x = dot * (softmax_scale / softcap);
            const float t =
                1.0f - 2.0f * ptx::rcp_approx(1.0f + ptx::ex2_approx(2.0f * kLog2E * x));
            score = softcap * t;
            slope = fmaf(-t, t, 1.0f);
        }
        score -= alibi_slope * fabsf(static_cast<float>(row + first_diagonal - key));
        const bool masked = dot == negative_infinity();
        p = masked ? 0.0f : ptx::ex2_approx(fmaf(score, kLog2E, -lse_log2));
        weight = p * slope;
    }
    /// P and dS / d(softmax_scale * dot).
    __device__ __forceinline__ void gradients(float dot, float dp, int row, int key, float lse_log2,
                                              float delta, float& p, float& ds) const {
        float weight;
        probability(dot, row, key, lse_log2, p, weight);
        ds = weight * (dp - delta);
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
