#pragma once

#include <cstdint>

#include "attention/online_softmax.cuh"
#include "attention/warp_mma.cuh"

namespace flash_attn_norm {
namespace decode {

/// acc_o += P V for 16 rows, with P in registers, the scores' tile rounded to the element type.
/// between(i) runs after the i-th pair of columns of a step of 16 keys, as in gemm.
template <class Element, int kPitch, int kTilesN, int kTilesD, class Between>
__device__ __forceinline__ void multiply_values(float (&acc_o)[1][kTilesD][4],
                                                const float (&p)[1][kTilesN][4], uint32_t v,
                                                Between&& between) {
#pragma unroll
    for (int k = 0; k < kTilesN / 2; ++k) {
        const float (&left)[4] = p[0][2 * k], (&right)[4] = p[0][2 * k + 1];
        const uint32_t a[4] = {Element::pack(left[0], left[1]), Element::pack(left[2], left[3]),
                               Element::pack(right[0], right[1]),
                               Element::pack(right[2], right[3])};
#pragma unroll
        for (int n = 0; n < kTilesD / 2; ++n) {
            uint32_t b[4];
            load_b<Layout::kContractionOuter, kPitch>(b, v, n, k);
            Element::mma(acc_o[0][2 * n], a, b[0], b[1]);
            Element::mma(acc_o[0][2 * n + 1], a, b[2], b[3]);
            between(k * kTilesD / 2 + n);
        }
    }
}

/// OnlineSoftmax::update for 16 rows, some of which may have seen no key yet. Where no row has a
/// new maximum, as in most tiles of a long sequence, the output stays as it is.
template <int kTilesN, int kTilesD>
__device__ __forceinline__ void update_softmax(OnlineSoftmax<1>& softmax,
                                               float (&acc_s)[1][kTilesN][4],
                                               float (&acc_o)[1][kTilesD][4], float scale_log2) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float tile_max = acc_s[0][0][2 * r];
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            tile_max = fmaxf(tile_max, fmaxf(acc_s[0][n][2 * r], acc_s[0][n][2 * r + 1]));
        }
        const float old_max = softmax.row_max[0][r];
        const float new_max = fmaxf(old_max, quad_max(tile_max));
        softmax.row_max[0][r] = new_max;
        const float base = new_max < kLowestScore ? 0.0f : new_max;
        shrink[r] = shrink_of</*kAnyRange=*/false>(old_max, base, scale_log2);
        float tile_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                acc_s[0][n][e] =
                    probability_of</*kAnyRange=*/false>(acc_s[0][n][e], base, scale_log2);
                tile_sum += acc_s[0][n][e];
            }
        }
        softmax.row_sum[0][r] = fmaf(softmax.row_sum[0][r], shrink[r], tile_sum);
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
            acc_o[0][d][0] *= shrink[0], acc_o[0][d][1] *= shrink[0];
            acc_o[0][d][2] *= shrink[1], acc_o[0][d][3] *= shrink[1];
        }
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
