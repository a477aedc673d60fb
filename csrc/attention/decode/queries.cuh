#pragma once

#include <cstdint>

#include "attention/decode/row_tiles.h"

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

}  // namespace decode
}  // namespace flash_attn_norm
