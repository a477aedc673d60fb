#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"
#include "attention/element.cuh"
#include "common/vec.cuh"

namespace flash_attn_norm {
namespace decode {

/// Copies `num_rows` packed query rows from the block's first one on to shared memory, kColumns
/// columns each: thread `thread` of num_threads puts 16 bytes at destination(row, unit). Rows and
/// columns that do not exist are zeros. By ordinary loads: they travel beside the first tiles of
/// keys and values, and do not count among their groups.
template <int kColumns, class Destination>
__device__ __forceinline__ void load_queries(const SplitParams& params, const SplitBlock& block,
                                             int num_rows, int thread, int num_threads,
                                             Destination&& destination) {
    constexpr int kUnits = kColumns / 8;
    const uint16_t* q =
        static_cast<const uint16_t*>(params.q) + block.batch * params.q_strides.batch;  // packed: 0
    const int64_t first_row = params.is_packed() ? block.row_q : 0;
#pragma unroll 4
    for (int i = thread; i < num_rows * kUnits; i += num_threads) {
        const int row = i / kUnits, unit = i % kUnits;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (row < block.num_rows && unit < params.head_units) {
            const PackedRow packed = block.packed_row(params.group_size, row);
            words = *reinterpret_cast<const uint4*>(
                q + (first_row + packed.row) * params.q_strides.row +
                packed.head * params.q_strides.head + unit * 8);
        }
        *reinterpret_cast<uint4*>(destination(row, unit)) = words;
    }
}

/// Of Q beside float8 keys: as they are, or the even ones of each 16 before the odd ones
/// (float8_products.cuh).
enum class ColumnOrder { kPlain, kEvenFirst };

/// The same for float8 keys, by warp `warp` of num_warps: as float16, in that order. A row is
/// multiplied with the power of two that brings its largest element to [2^14, 2^15): no bfloat16 is
/// too large then, and what becomes subnormal is 2^-28 of that one. factors[row] is what its
/// products are to be multiplied with: `factor` without that power.
template <int kColumns, ColumnOrder kOrder, class Destination>
__device__ __forceinline__ void load_float8_queries(const SplitParams& params,
                                                    const SplitBlock& block, int num_rows, int warp,
                                                    int num_warps, float factor, float* factors,
                                                    Destination&& destination) {
    constexpr int kUnits = kColumns / 8;
    static_assert(kUnits <= 32, "a unit a lane");
    const int unit = static_cast<int>(threadIdx.x) % 32;
    const uint16_t* q = static_cast<const uint16_t*>(params.q) +
                        block.batch * params.q_strides.batch +
                        (params.is_packed() ? block.row_q : 0) * params.q_strides.row + unit * 8;
#pragma unroll 4
    for (int row = warp; row < num_rows; row += num_warps) {
        float values[8] = {};
        if (row < block.num_rows && unit < params.head_units) {
            const PackedRow packed = block.packed_row(params.group_size, row);
            load_as_floats<8>(
                q + packed.row * params.q_strides.row + packed.head * params.q_strides.head,
                params.dtype, 0, values);
        }
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
        }
        const uint32_t exponent = max(__reduce_max_sync(0xffffffffu, largest) >> 23, 15u);
        const float scale = __uint_as_float((127u + 14u + 127u - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= scale;
        if (kOrder == ColumnOrder::kPlain && unit < kUnits) {
            *reinterpret_cast<uint4*>(destination(row, unit)) = make_uint4(
                Float16::pack(values[0], values[1]), Float16::pack(values[2], values[3]),
                Float16::pack(values[4], values[5]), Float16::pack(values[6], values[7]));
        } else if (unit < kUnits) {
            const int half = unit % 2 * 4;
            *reinterpret_cast<uint2*>(destination(row, unit - unit % 2) + half) = make_uint2(
                Float16::pack(values[0], values[2]), Float16::pack(values[4], values[6]));
            *reinterpret_cast<uint2*>(destination(row, unit - unit % 2 + 1) + half) = make_uint2(
                Float16::pack(values[1], values[3]), Float16::pack(values[5], values[7]));
        }
        if (unit == 0) factors[row] = factor * __uint_as_float((exponent - 14u) << 23);
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
