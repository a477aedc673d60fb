#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"
#include "attention/scores.cuh"

namespace flash_attn_norm {
namespace decode {

/// The two packed query rows of a lane (accumulator rows lane / 4 and 8 below): their heads, masks
/// and score terms. See AttentionProblem about the terms.
struct PackedRows {
    int row[2];            // query row inside the sequence
    int begin[2], end[2];  // keys that the row sees
    float alibi_slope[2] = {0.0f, 0.0f};
    ScoreTerms terms;  // all but the slope

    /// `tile_row`: the lane's first row inside the block.
    __device__ __forceinline__ PackedRows(const AttentionProblem& problem, const SplitBlock& block,
                                          const Mask& mask, int tile_row) {
        terms.softmax_scale = problem.softmax_scale;
        terms.softcap = problem.softcap;
        terms.shift = static_cast<int>(mask.shift());
        terms.has_alibi = problem.alibi_slopes != nullptr;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool real = tile_row + 8 * r < block.num_rows;
            const PackedRow packed = block.packed_row(real ? tile_row + 8 * r : 0);
            const KeyRange keys = KeyRange::of(mask.keys_of_row(packed.row));
            row[r] = packed.row;
            begin[r] = keys.begin;
            end[r] = keys.end;
            if (terms.has_alibi && block.batch < problem.batch_size) {
                alibi_slope[r] =
                    problem.alibi_slopes[block.batch * problem.alibi_batch_stride + packed.head];
            }
        }
    }

    /// q . k -> score in natural units; `key` is that of the lane's first column.
    template <int kTilesN>
    __device__ __forceinline__ void apply_terms(float (&acc_s)[1][kTilesN][4], int key) const {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float dot = acc_s[0][n][e];
                float score = terms.softcap > 0.0f ? terms.softcap * terms.squashed(dot)
                                                   : terms.softmax_scale * dot;
                const int distance = row[e >> 1] + terms.shift - (key + 8 * n + (e & 1));
                score -= alibi_slope[e >> 1] * fabsf(static_cast<float>(distance));
                acc_s[0][n][e] = score;
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
