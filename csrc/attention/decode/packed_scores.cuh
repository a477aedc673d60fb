#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"
#include "attention/online_softmax.cuh"

namespace flash_attn_norm {
namespace decode {

/// The two packed query rows of a lane (accumulator rows lane / 4 and 8 below): their masks and
/// score terms; those of the block's first row where it has no such row. See AttentionProblem about
/// the terms.
struct PackedRows {
    int row[2];            // query row inside the sequence
    int begin[2], end[2];  // keys that the row sees
    float alibi_slope[2] = {0.0f, 0.0f};
    float softmax_scale, softcap, scale_over_softcap;
    int shift;  // seqlen_k - seqlen_q
    bool has_terms;

    /// `tile_row`: the lane's first row inside the block.
    __device__ __forceinline__ PackedRows(const SplitParams& params, const SplitBlock& block,
                                          const KeyBand& band, int tile_row) {
        softmax_scale = params.softmax_scale;
        softcap = params.softcap;
        scale_over_softcap = params.scale_over_softcap;
        shift = band.shift;
        has_terms = params.has_terms();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = tile_row + 8 * r < block.num_rows;
            const PackedRow packed =
                block.packed_row(params.group_size, exists ? tile_row + 8 * r : 0);
            row[r] = packed.row;
            begin[r] = band.begin(packed.row);
            end[r] = band.end(packed.row);
            if (params.alibi_slopes != nullptr && block.batch < params.batch_size) {
                alibi_slope[r] =
                    params.alibi_slopes[block.batch * params.alibi_batch_stride + packed.head];
            }
        }
    }

    /// What scores are multiplied with before 2 is raised to them: of apply_terms, or raw products.
    __device__ __forceinline__ float scale_log2() const {
        return has_terms ? kLog2E : softmax_scale * kLog2E;
    }

    /// By the exponential: tanh.approx is good for 2^-11 only, too little for the LSE.
    __device__ __forceinline__ static float tanh_of(float x) {
        return 1.0f - 2.0f * ptx::rcp_approx(1.0f + ptx::ex2_approx(2.0f * kLog2E * x));
    }

    /// q . k -> score in natural units; `key` is that of the lane's first column.
    template <int kTilesN>
    __device__ __forceinline__ void apply_terms(float (&acc_s)[1][kTilesN][4], int key) const {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float dot = acc_s[0][n][e];
                const float score = softcap > 0.0f ? softcap * tanh_of(dot * scale_over_softcap)
                                                   : softmax_scale * dot;
                const int distance = row[e >> 1] + shift - (key + 8 * n + (e & 1));
                acc_s[0][n][e] = score - alibi_slope[e >> 1] * fabsf(static_cast<float>(distance));
            }
        }
    }

    /// Sets the scores of keys that their row does not see to -inf.
    template <int kTilesN>
    __device__ __forceinline__ void apply_mask(float (&acc_s)[1][kTilesN][4], int key) const {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = key + 8 * n + (e & 1);
                if (column < begin[e >> 1] || column >= end[e >> 1]) {
                    acc_s[0][n][e] = negative_infinity();
                }
            }
        }
    }
};

}  // namespace decode
}  // namespace flash_attn_norm
