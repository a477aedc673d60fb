#pragma once

#include <cstdint>

#include "attention/decode/packed_scores.cuh"
#include "attention/decode/row_total.cuh"
#include "attention/decode/split_output.cuh"
#include "attention/decode/warp_products.cuh"
#include "attention/online_softmax.cuh"
#include "attention/warp_mma.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/tma.cuh"

namespace flash_attn_norm {
namespace decode {

/// A warp's part of a warpgroup's 64 rows and its state over the key loop, kTilesD * 8 columns of
/// values from `column` on.
template <int kTilesD>
struct WarpgroupRows {
    int lane, warpgroup;
    int row;     // this lane's first one in the block; the other one is 8 below
    int column;  // of the values
    OnlineSoftmax<1> softmax;
    float acc_o[1][kTilesD][4];

    __device__ __forceinline__ WarpgroupRows(int warpgroup_, int first_row, int column_)
        : lane(static_cast<int>(threadIdx.x) % 32),
          warpgroup(warpgroup_),
          row(first_row + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4),
          column(column_) {
        clear(acc_o);
    }
};

/// P = exp2(S * scale_log2 - row_max) of a tile of keys from first_key on, as the first operand of
/// the products with their values; older output shrinks by the same factor.
template <class Element, int kTilesN, int kTilesD>
__device__ __forceinline__ void weigh(uint32_t (&p)[2 * kTilesN], float (&acc_s)[1][kTilesN][4],
                                      WarpgroupRows<kTilesD>& warp, const PackedRows& rows,
                                      int first_key, bool is_whole, float scale_log2) {
    const int key = first_key + 2 * (warp.lane % 4);
    if (rows.has_terms) rows.apply_terms(acc_s, key);
    if (!is_whole) rows.apply_mask(acc_s, key);
    update_softmax(warp.softmax, acc_s, warp.acc_o, scale_log2);
#pragma unroll
    for (int i = 0; i < 2 * kTilesN; ++i) {
        p[i] = Element::pack(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
    }
}

/// Zeros in place of values that no row sees, which may be anything, by the threads of a
/// warpgroup. Another one may do the same meanwhile.
template <class Tile>
__device__ __forceinline__ void clear_unseen_rows(unsigned char* values, int position,
                                                  const KeyRange& positions, int warpgroup) {
    constexpr int kUnits = Tile::kColumns / 8;
    for (int i = static_cast<int>(threadIdx.x) % 128; i < Tile::kRows * kUnits; i += 128) {
        const int row = i % Tile::kRows, unit = i / Tile::kRows;
        if (position + row >= positions.begin && position + row < positions.end) continue;
        *reinterpret_cast<uint4*>(values + Tile::unit_offset(row, unit)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();
    if (warpgroup == 0) {  // numbers that the compiler knows: it reserves all barriers otherwise
        ptx::bar_sync(2, 128);
    } else {
        ptx::bar_sync(3, 128);
    }
}

/// Writes the warp's rows: the result if there is one split, else this split's part of it.
/// `value_factor`: of a float8 cache.
template <class Config>
__device__ __forceinline__ void store_warpgroup_rows(WarpgroupRows<Config::kTilesD>& warp,
                                                     const SplitParams& params,
                                                     const SplitBlock& block, float scale_log2,
                                                     float value_factor) {
    const bool covered = block.batch < params.batch_size;
    const bool writes_lse = warp.column == 0 && warp.lane % 4 == 0;
    const int first_column = warp.column + 2 * (warp.lane % 4);
    const int columns = params.head_units_v * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(warp.softmax.row_sum[0][r]);
        const int tile_row = warp.row + 8 * r;
        if (tile_row >= block.num_rows) continue;
        const PackedRow packed = block.packed_row(params.group_size, tile_row);
        const int64_t row = block.row_q + packed.row;
        const int64_t place = row * params.num_heads_q + packed.head;
        const RowTotal total{scaled_max(warp.softmax.row_max[0][r], scale_log2), sum};
        if (params.num_splits == 1) {
            float normalizer;
            const float lse = total.finish(sink_of(params, covered, packed.head), normalizer);
            normalizer *= value_factor;
            if (writes_lse) {
                params.softmax_lse[lse_index(params, row, block.batch, packed.head)] = lse;
            }
            uint16_t* out = static_cast<uint16_t*>(params.out) + place * columns + first_column;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                if (first_column + 8 * d >= columns) break;
                *reinterpret_cast<uint32_t*>(out + 8 * d) =
                    pack_output<Config>(params, warp.acc_o[0][d][2 * r] * normalizer,
                                        warp.acc_o[0][d][2 * r + 1] * normalizer);
            }
        } else {
            const int64_t part = int64_t{blockIdx.y} * params.total_rows + place;
            if (writes_lse) params.partial_lse[part] = total.lse_log2();
            if (!total.has_keys()) continue;
            const float normalizer = ptx::rcp_approx(sum) * value_factor;
            float* out = params.partial_out + part * columns + first_column;
#pragma unroll
            for (int d = 0; d < Config::kTilesD; ++d) {
                if (first_column + 8 * d >= columns) break;
                *reinterpret_cast<float2*>(out + 8 * d) = make_float2(
                    warp.acc_o[0][d][2 * r] * normalizer, warp.acc_o[0][d][2 * r + 1] * normalizer);
            }
        }
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
