#pragma once

#include <cstdint>

#include "attention/decode/config.h"
#include "attention/decode/packed_scores.cuh"
#include "attention/decode/row_total.cuh"

namespace flash_attn_norm {
namespace decode {

/// What raw products with float8 keys are to be multiplied with, and weighted sums of float8
/// values.
template <class Config>
__device__ __forceinline__ float key_factor(const SplitParams& params, const SplitBlock& block) {
    return block.batch < params.batch_size
               ? Config::kFloat8Scale * params.cache.k_descale.of(block.batch, block.kv_head)
               : 1.0f;
}
template <class Config>
__device__ __forceinline__ float value_factor(const SplitParams& params, const SplitBlock& block) {
    return block.batch < params.batch_size
               ? Config::kFloat8Scale * params.cache.v_descale.of(block.batch, block.kv_head)
               : 1.0f;
}

/// Two neighbours of a row of out.
template <class Config>
__device__ __forceinline__ uint32_t pack_output(const SplitParams& params, float low, float high) {
    if (Config::kFloat8 && params.dtype == DType::kBFloat16) return BFloat16::pack(low, high);
    return Config::Element::pack(low, high);
}

/// Puts each set's maxima and sums into shared memory. A barrier of the sets follows, behind which
/// the operands' tiles are free as well, and share_output.
template <class Storage, class Warp>
__device__ __forceinline__ void share_sums(Storage& shared, const Warp& warp) {
    const int tile_row = warp.row + warp.lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(warp.softmax.row_sum[0][r]);
        if (warp.lane % 4 == 0 && warp.column == 0) {
            // A sum of 0: every score so low that it counts as -inf
            shared.row_max[warp.set][tile_row + 8 * r] =
                sum == 0.0f ? negative_infinity() : warp.softmax.row_max[0][r];
            shared.row_sum[warp.set][tile_row + 8 * r] = sum;
        }
    }
}

/// Puts each set's output, scaled to the common maximum and by `of_values`, and the totals of all
/// sets into shared memory. A barrier of the CTA follows.
template <class Config, class Storage, class Warp>
__device__ __forceinline__ void share_output(Storage& shared, const Warp& warp, int num_rows,
                                             float of_values) {
    const int tile_row = warp.row + warp.lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = tile_row + 8 * r;
        if (row >= num_rows) continue;
        float top = negative_infinity(), sum = 0.0f;
        for (int set = 0; set < warp.sets; ++set) top = fmaxf(top, shared.row_max[set][row]);
        const float base = top == negative_infinity() ? 0.0f : top;
        const float factor = ptx::ex2_approx(shared.row_max[warp.set][row] - base) * of_values;
        if (warp.set == 0 && warp.column == 0 && warp.lane % 4 == 0) {
            for (int set = 0; set < warp.sets; ++set) {
                sum += shared.row_sum[set][row] * ptx::ex2_approx(shared.row_max[set][row] - base);
            }
            shared.total_max[row] = top;
            shared.total_sum[row] = sum;
        }
        float* out = shared.out(warp.set) + row * Config::kPitchOut + warp.column;
        const auto entry = [&](int d, int e) { return warp.acc_o[0][d][2 * r + e] * factor; };
        const int place = warp.lane % 4;
#pragma unroll
        for (int d = 0; d < Config::kTilesD; d += 2) {
            if constexpr (Config::kFloat8) {  // even and odd columns
                *reinterpret_cast<float4*>(out + 8 * d + 4 * place) =
                    make_float4(entry(d, 0), entry(d + 1, 0), entry(d, 1), entry(d + 1, 1));
            } else {
                *reinterpret_cast<float2*>(out + 8 * d + 2 * place) =
                    make_float2(entry(d, 0), entry(d, 1));
                *reinterpret_cast<float2*>(out + 8 * (d + 1) + 2 * place) =
                    make_float2(entry(d + 1, 0), entry(d + 1, 1));
            }
        }
    }
}

/// One row's eight columns from `unit` on, summed over the sets, times `factor`.
template <class Config, class Storage>
__device__ __forceinline__ void sum_of_sets(Storage& shared, int sets, int row, int unit,
                                            float factor, float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = 0.0f;
    for (int set = 0; set < sets; ++set) {
        const float4* source =
            reinterpret_cast<const float4*>(shared.out(set) + row * Config::kPitchOut + unit * 8);
        const float4 low = source[0], high = source[1];
        values[0] += low.x, values[1] += low.y, values[2] += low.z, values[3] += low.w;
        values[4] += high.x, values[5] += high.y, values[6] += high.z, values[7] += high.w;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] *= factor;
}

/// Adds up the shares of `sets` sets and writes the rows: the result if there is one split, else
/// this split's part of it with its LSE.
template <class Config, class Storage>
__device__ __forceinline__ void store_rows(Storage& shared, int sets, const SplitParams& params,
                                           const SplitBlock& block) {
    constexpr int kUnits = Config::kHeadDimV / 8;
    const bool covered = block.batch < params.batch_size;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Config::kBlockM * kUnits; i += blockDim.x) {
        const int tile_row = i / kUnits, unit = i % kUnits;
        if (tile_row >= block.num_rows || unit >= params.head_units_v) continue;
        const PackedRow packed = block.packed_row(params.group_size, tile_row);
        const int64_t row = (block.row_q + packed.row) * params.num_heads_q + packed.head;
        const RowTotal total{shared.total_max[tile_row], shared.total_sum[tile_row]};
        float values[8];
        if (params.num_splits == 1) {
            float normalizer;
            const float lse = total.finish(sink_of(params, covered, packed.head), normalizer);
            if (unit == 0) {
                params.softmax_lse[lse_index(params, block.row_q + packed.row, block.batch,
                                             packed.head)] = lse;
            }
            sum_of_sets<Config>(shared, sets, tile_row, unit, normalizer, values);
            reinterpret_cast<uint4*>(params.out)[row * params.head_units_v + unit] =
                make_uint4(pack_output<Config>(params, values[0], values[1]),
                           pack_output<Config>(params, values[2], values[3]),
                           pack_output<Config>(params, values[4], values[5]),
                           pack_output<Config>(params, values[6], values[7]));
        } else {
            const int64_t place = int64_t{blockIdx.y} * params.total_rows + row;
            if (unit == 0) params.partial_lse[place] = total.lse_log2();
            if (!total.has_keys()) continue;
            sum_of_sets<Config>(shared, sets, tile_row, unit, ptx::rcp_approx(total.sum), values);
            float4* out = reinterpret_cast<float4*>(params.partial_out) +
                          (place * params.head_units_v + unit) * 2;
            out[0] = make_float4(values[0], values[1], values[2], values[3]);
            out[1] = make_float4(values[4], values[5], values[6], values[7]);
        }
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
