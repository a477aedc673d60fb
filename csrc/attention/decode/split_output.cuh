#pragma once

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/row_total.cuh"

namespace flash_attn_norm {
namespace decode {

template <class Config>
struct SplitWarp;

/// Eight values as one 16-byte unit of the element type.
template <class Element>
__device__ __forceinline__ uint4 pack_unit(const float (&values)[8], float factor) {
    return make_uint4(Element::pack(values[0] * factor, values[1] * factor),
                      Element::pack(values[2] * factor, values[3] * factor),
                      Element::pack(values[4] * factor, values[5] * factor),
                      Element::pack(values[6] * factor, values[7] * factor));
}

template <class Config>
__device__ __forceinline__ RowTotal row_total(const SplitSharedStorage<Config>& shared, int row) {
    RowTotal total;
    total.max = shared.row_max[0][row];
#pragma unroll
    for (int set = 1; set < Config::kSets; ++set) {
        total.max = fmaxf(total.max, shared.row_max[set][row]);
    }
    if (total.max == negative_infinity()) return total;
#pragma unroll
    for (int set = 0; set < Config::kSets; ++set) {
        total.sum +=
            shared.row_sum[set][row] * ptx::ex2_approx(shared.row_max[set][row] - total.max);
    }
    return total;
}

/// Puts each set's sums and output, scaled to the common maximum, into shared memory.
template <class Config>
__device__ __forceinline__ void share_output(SplitSharedStorage<Config>& shared,
                                             SplitWarp<Config>& warp, float scale_log2) {
    const int tile_row = warp.row + warp.lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(warp.softmax.row_sum[0][r]);
        const float row_max = warp.softmax.row_max[0][r];
        if (warp.lane % 4 == 0 && warp.column == 0) {
            // A sum of 0: every score so low that it counts as -inf
            shared.row_max[warp.set][tile_row + 8 * r] =
                sum == 0.0f ? negative_infinity() : row_max * scale_log2;
            shared.row_sum[warp.set][tile_row + 8 * r] = sum;
        }
    }
    __syncthreads();  // the operands' tiles are free, too
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = tile_row + 8 * r;
        const float own = shared.row_max[warp.set][row];
        const float factor =
            own == negative_infinity() ? 0.0f : ptx::ex2_approx(own - row_total(shared, row).max);
        float* out =
            &shared.out[warp.set][row * Config::kPitchOut + warp.column + 2 * (warp.lane % 4)];
#pragma unroll
        for (int d = 0; d < Config::kTilesD; ++d) {
            *reinterpret_cast<float2*>(out + 8 * d) =
                make_float2(warp.acc_o[0][d][2 * r] * factor, warp.acc_o[0][d][2 * r + 1] * factor);
        }
    }
    __syncthreads();
}

/// Adds up the sets' shares and writes the rows: the result if there is one split, else this
/// split's part of it with its LSE.
template <class Config>
__device__ __forceinline__ void store_output(SplitSharedStorage<Config>& shared,
                                             SplitWarp<Config>& warp,
                                             const KvCacheAttentionParams& params,
                                             const SplitPlan& plan, const SplitBlock& block,
                                             float scale_log2) {
    using Element = typename Config::Element;
    constexpr int kUnits = Config::kHeadDimV / 8;
    const AttentionProblem& problem = params.problem;
    const int units = problem.head_dim_v / 8;
    const bool covered = block.batch < problem.batch_size;
    __syncthreads();
    share_output(shared, warp, scale_log2);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Config::kBlockM * kUnits;
         i += Config::kThreads) {
        const int tile_row = i / kUnits, unit = i % kUnits;
        if (tile_row >= block.num_rows || unit >= units) continue;
        const PackedRow packed = block.packed_row(tile_row);
        const int64_t flat = (block.row_q + packed.row) * problem.num_heads_q + packed.head;
        const RowTotal total = row_total(shared, tile_row);
        float values[8] = {};
#pragma unroll
        for (int set = 0; set < Config::kSets; ++set) {
            const float4* source = reinterpret_cast<const float4*>(
                &shared.out[set][tile_row * Config::kPitchOut + unit * 8]);
            const float4 low = source[0], high = source[1];
            values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
            values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
        }
        if (plan.num_splits == 1) {
            const float sink = problem.s_aux == nullptr || !covered
                                   ? negative_infinity()
                                   : load_as_float(problem.s_aux, problem.s_aux_dtype, packed.head);
            float normalizer;
            const float lse = total.finish(sink, normalizer);
            if (unit == 0) {
                params.softmax_lse[lse_index(problem, block.batch, packed.row, block.row_q,
                                             packed.head)] = lse;
            }
            uint16_t* out = static_cast<uint16_t*>(params.out) + flat * problem.head_dim_v;
            reinterpret_cast<uint4*>(out)[unit] = pack_unit<Element>(values, normalizer);
        } else {
            const int64_t place = block.split * plan.total_rows + flat;
            const bool seen = total.sum > 0.0f;
            if (unit == 0) {
                plan.partial_lse[place] =
                    seen ? total.max + ptx::lg2_approx(total.sum) : negative_infinity();
            }
            if (!seen) continue;
            const float factor = 1.0f / total.sum;
            float4* out =
                reinterpret_cast<float4*>(plan.partial_out + place * problem.head_dim_v) + 2 * unit;
            out[0] = make_float4(values[0] * factor, values[1] * factor, values[2] * factor,
                                 values[3] * factor);
            out[1] = make_float4(values[4] * factor, values[5] * factor, values[6] * factor,
                                 values[7] * factor);
        }
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
