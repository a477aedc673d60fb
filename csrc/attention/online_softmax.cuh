#pragma once

#include <cstdint>

#include "ptx/math.cuh"

namespace flash_attn_norm {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float negative_infinity() {
    return __int_as_float(static_cast<int>(0xff800000u));
}

/// Reductions over the four lanes that share the rows of an mma accumulator.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

/// Lower scores, such as a bias of the lowest float, are -inf as powers of two: they hide their
/// key.
constexpr float kLowestScore = -2.3e38f;

/// A row maximum in powers of two, rounded up: fma(score, scale_log2, -scaled_max) is an exponent
/// of at most 0 then, however large the scores are, and no probability overflows. Those of a row
/// share the rounding, and so must all that is computed from them.
__device__ __forceinline__ float scaled_max(float row_max, float scale_log2) {
    return __fmul_ru(row_max, scale_log2);
}

/// 2^((score - base) * scale_log2). kAnyRange: the base is taken off first, which is exact for
/// scores near it however large they are; else one instruction does both.
template <bool kAnyRange>
__device__ __forceinline__ float probability_of(float score, float base, float scale_log2) {
    return ptx::ex2_approx(kAnyRange ? (score - base) * scale_log2
                                     : fmaf(score, scale_log2, -scaled_max(base, scale_log2)));
}

/// What older probabilities are multiplied by when the base grows.
template <bool kAnyRange>
__device__ __forceinline__ float shrink_of(float old_max, float base, float scale_log2) {
    return ptx::ex2_approx(kAnyRange
                               ? (old_max - base) * scale_log2
                               : scaled_max(old_max, scale_log2) - scaled_max(base, scale_log2));
}

constexpr float kLargestFloat = 3.4028235e38f;

/// Softmax over keys that arrive tile by tile. An accumulator tile is [kTilesM][tiles of 8
/// columns][4] as mma.m16n8 leaves it: entries 0 and 1 lie in row 16 m + lane / 4, entries 2 and 3
/// eight rows below. row_sum holds this lane's columns only until finish().
template <int kTilesM>
struct OnlineSoftmax {
    float row_max[kTilesM][2];  // of the unscaled scores
    float row_sum[kTilesM][2];

    __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            row_max[m][0] = row_max[m][1] = negative_infinity();
            row_sum[m][0] = row_sum[m][1] = 0.0f;
        }
    }

    /// scores -> exp2(scale_log2 * (scores - row_max)) in place; older output shrinks by the same
    /// factor. kGuard: a row may have seen no key yet; its maximum is -inf then, or so low that it
    /// is -inf times log2(e), and 0 stands in so that no inf - inf arises. kAnyRange: right for
    /// scores of any magnitude; else up to what docs/numerics.md says. between(i) runs after the
    /// i-th of 2 kTilesM groups of rows.
    template <bool kGuard, bool kAnyRange, int kTilesN, int kTilesD, class Between>
    __device__ __forceinline__ void update(float (&acc_s)[kTilesM][kTilesN][4],
                                           float (&acc_o)[kTilesM][kTilesD][4], float scale_log2,
                                           Between&& between) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tile_max = acc_s[m][0][2 * r];
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    tile_max = fmaxf(tile_max, fmaxf(acc_s[m][n][2 * r], acc_s[m][n][2 * r + 1]));
                }
                const float old_max = row_max[m][r];
                const float new_max = fmaxf(old_max, quad_max(tile_max));
                row_max[m][r] = new_max;
                const float base = kGuard && new_max < kLowestScore ? 0.0f : new_max;
                const float shrink = shrink_of<kAnyRange>(old_max, base, scale_log2);
                float tile_sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        acc_s[m][n][e] =
                            probability_of<kAnyRange>(acc_s[m][n][e], base, scale_log2);
                        tile_sum += acc_s[m][n][e];
                    }
                }
                row_sum[m][r] = fmaf(row_sum[m][r], shrink, tile_sum);
#pragma unroll
                for (int d = 0; d < kTilesD; ++d) {
                    acc_o[m][d][2 * r] *= shrink;
                    acc_o[m][d][2 * r + 1] *= shrink;
                }
                between(2 * m + r);
            }
        }
    }

    /// update() for output that a product in flight still adds to: leaves it alone, returns in
    /// `shrink` the factors that it must be multiplied by, and false if they are all 1. kLazy: as
    /// long as no maximum of the warp's rows has grown by more than 2^8 since it was last taken,
    /// the old ones stay, and probabilities may reach 2^8. The results are the same up to
    /// rounding, but a row's largest probability is no longer exactly 1.
    template <bool kGuard, bool kLazy, int kTilesN>
    __device__ __forceinline__ bool probabilities(float (&acc_s)[kTilesM][kTilesN][4],
                                                  float (&shrink)[kTilesM][2], float scale_log2) {
        constexpr float kLazyLog2 = 8.0f;
        float new_max[kTilesM][2];
        bool grew = false;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tile_max = row_max[m][r];
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    tile_max = fmaxf(tile_max, fmaxf(acc_s[m][n][2 * r], acc_s[m][n][2 * r + 1]));
                }
                new_max[m][r] = quad_max(tile_max);
                grew |= (new_max[m][r] - row_max[m][r]) * scale_log2 > kLazyLog2;
            }
        }
        grew = !kLazy || __any_sync(0xffffffffu, grew);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!grew) new_max[m][r] = row_max[m][r];
                const float base = kGuard && new_max[m][r] < kLowestScore ? 0.0f : new_max[m][r];
                shrink[m][r] = shrink_of</*kAnyRange=*/false>(row_max[m][r], base, scale_log2);
                row_max[m][r] = new_max[m][r];
                float tile_sum = 0.0f;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        acc_s[m][n][e] =
                            probability_of</*kAnyRange=*/false>(acc_s[m][n][e], base, scale_log2);
                        tile_sum += acc_s[m][n][e];
                    }
                }
                row_sum[m][r] = fmaf(row_sum[m][r], shrink[m][r], tile_sum);
            }
        }
        return grew;
    }

    /// The logarithm of the row's sum in natural units, and in `normalizer` the factor that turns
    /// the accumulated output into the result. `sink` is one more logit of the row, -inf for none.
    __device__ __forceinline__ float finish(int m, int r, float scale_log2, float sink,
                                            float& normalizer) {
        const float sum = quad_sum(row_sum[m][r]);
        if (sum == 0.0f || row_max[m][r] == negative_infinity()) {  // no key seen
            normalizer = 0.0f;
            return sink;
        }
        const float max_log2 = fminf(scaled_max(row_max[m][r], scale_log2), kLargestFloat);
        const float sink_log2 = sink * kLog2E;
        const float top = fmaxf(max_log2, sink_log2);
        const float shrink = ptx::ex2_approx(max_log2 - top);
        const float total = fmaf(sum, shrink, ptx::ex2_approx(sink_log2 - top));
        normalizer = shrink / total;
        return kLn2 * (top + ptx::lg2_approx(total));
    }
};

}  // namespace flash_attn_norm
