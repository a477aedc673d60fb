#pragma once

#include <cstdint>

#include "attention/bias.cuh"
#include "attention/dropout.h"
#include "attention/element.cuh"
#include "attention/mask.h"
#include "attention/online_softmax.cuh"
#include "attention/seqlens.h"

namespace flash_attn_norm {

/// Calls fn(score, row, key) for every entry of a warp's accumulator tile; `row` and `key` are
/// those of this lane's first entry.
template <int kTilesM, int kTilesN, class Fn>
__device__ __forceinline__ void for_each_score(float (&acc_s)[kTilesM][kTilesN][4], int row,
                                               int key, Fn&& fn) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                fn(acc_s[m][n][e], row + 16 * m + 8 * (e >> 1), key + 8 * n + (e & 1));
            }
        }
    }
}

/// Sets the scores of keys that their row does not see to -inf.
template <int kTilesM, int kTilesN>
__device__ __forceinline__ void apply_mask(float (&acc_s)[kTilesM][kTilesN][4], int row, int key,
                                           const RowBounds& bounds) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 16 * m + 8 * r;
            const int begin = i + bounds.left - key;
            const int end = min(i + bounds.right, bounds.seqlen_k) - key;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = 8 * n + e;
                    if (column < begin || column >= end) {
                        acc_s[m][n][2 * r + e] = negative_infinity();
                    }
                }
            }
        }
    }
}

/// Sets the scores of the columns from `end` on to -inf; end[r] counts from this lane's first
/// column, for its two rows of each tile of 16.
template <int kTilesN>
__device__ __forceinline__ void mask_from(float (&acc_s)[1][kTilesN][4], const int (&end)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * n + e >= end[r]) acc_s[0][n][2 * r + e] = negative_infinity();
            }
        }
    }
}

/// The same for the columns before `begin`.
template <int kTilesN>
__device__ __forceinline__ void mask_until(float (&acc_s)[1][kTilesN][4], const int (&begin)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * n + e < begin[r]) acc_s[0][n][2 * r + e] = negative_infinity();
            }
        }
    }
}

/// What is done to q . k before the softmax: see AttentionProblem. Row and key count inside the
/// sequence.
struct ScoreTerms {
    float softmax_scale = 1.0f;
    float softcap = 0.0f;
    float alibi_slope = 0.0f;
    bool has_alibi = false;
    int shift = 0;  // seqlen_k - seqlen_q
    Bias bias;

    __device__ static ScoreTerms make(const AttentionProblem& problem, const SeqlenInfo& info,
                                      int64_t batch, int head) {
        ScoreTerms terms;
        terms.softmax_scale = problem.softmax_scale;
        terms.softcap = problem.softcap;
        terms.shift = static_cast<int>(info.seqlen_k - info.seqlen_q);
        terms.has_alibi = problem.alibi_slopes != nullptr;
        if (terms.has_alibi && batch < problem.batch_size) {
            terms.alibi_slope = problem.alibi_slopes[batch * problem.alibi_batch_stride + head];
        }
        terms.bias = Bias::make(problem, info, head);
        return terms;
    }

    /// False: the scores stay q . k, and the softmax applies the scale. A scale that is not
    /// positive would turn the order of the scores around and the mask's -inf into +inf or NaN.
    __device__ bool transforms() const {
        return softcap > 0.0f || has_alibi || bias.exists() || !(softmax_scale > 0.0f);
    }

    /// tanh(softmax_scale * dot / softcap), by the exponential: tanh.approx is good for 2^-11 only,
    /// too little for the LSE.
    __device__ __forceinline__ float squashed(float dot) const {
        const float x = dot * (softmax_scale / softcap);
        return 1.0f - 2.0f * ptx::rcp_approx(1.0f + ptx::ex2_approx(2.0f * kLog2E * x));
    }

    __device__ __forceinline__ float alibi(int row, int key) const {
        return -alibi_slope * fabsf(static_cast<float>(row + shift - key));
    }

    /// q . k -> score in natural units but for the bias, for a whole tile.
    template <int kTilesM, int kTilesN>
    __device__ __forceinline__ void apply(float (&acc_s)[kTilesM][kTilesN][4], int row,
                                          int key) const {
        if (softcap > 0.0f) {
            for_each_score(acc_s, row, key,
                           [&](float& score, int, int) { score = softcap * squashed(score); });
        } else {
            for_each_score(acc_s, row, key,
                           [&](float& score, int, int) { score *= softmax_scale; });
        }
        if (has_alibi) {
            for_each_score(acc_s, row, key,
                           [&](float& score, int i, int j) { score += alibi(i, j); });
        }
    }

    /// The same for one entry; slope = d score / d (softmax_scale * dot).
    __device__ __forceinline__ float score(float dot, int row, int key, float& slope) const {
        float value = softmax_scale * dot;
        slope = 1.0f;
        if (softcap > 0.0f) {
            const float t = squashed(dot);
            value = softcap * t;
            slope = fmaf(-t, t, 1.0f);
        }
        if (has_alibi) value += alibi(row, key);
        return value;
    }
};

/// Calls fn(entry, keep) for every entry of a warp's accumulator tile.
template <int kTilesM, int kTilesN, class Fn>
__device__ __forceinline__ void for_each_dropout(float (&acc)[kTilesM][kTilesN][4], int row,
                                                 int key, const Dropout& dropout, Fn&& fn) {
    static_assert(kTilesN % 2 == 0, "a Philox call serves columns key and key + 8");
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const PhiloxOutput bits = dropout.bits(static_cast<uint32_t>(row + 16 * m),
                                                       static_cast<uint32_t>(key + 8 * n + e));
                fn(acc[m][n][e], bits.lane[0] >= dropout.drop_below);
                fn(acc[m][n][2 + e], bits.lane[1] >= dropout.drop_below);
                fn(acc[m][n + 1][e], bits.lane[2] >= dropout.drop_below);
                fn(acc[m][n + 1][2 + e], bits.lane[3] >= dropout.drop_below);
            }
        }
    }
}

}  // namespace flash_attn_norm
