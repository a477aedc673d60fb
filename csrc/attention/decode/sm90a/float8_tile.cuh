#pragma once

#include <cstdint>

#include "ptx/float8.cuh"

namespace flash_attn_norm {
namespace decode {

/// Rows [begin, end) of a tile of e4m3 numbers, as the copy engine has brought it, to a tile of
/// float16 of as many columns; zeros in place of the other rows. Eight neighbouring threads take
/// one unit of eight rows, which lie in different banks.
template <class Float8Tile, class Tile>
__device__ __forceinline__ void convert_float8_tile(const unsigned char* source,
                                                    unsigned char* destination, int begin, int end,
                                                    int thread, int num_threads) {
    constexpr int kRows = Tile::kRows;
    constexpr int kUnits = Tile::kColumns / 16;  // of a row of float8
    static_assert(Float8Tile::kRows == kRows && 2 * Float8Tile::kColumns == Tile::kColumns,
                  "the same numbers");
#pragma unroll 4
    for (int i = thread; i < kRows * kUnits; i += num_threads) {
        const int row = i % kRows, unit = i / kRows;
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (row >= begin && row < end) {
            const uint4 words =
                *reinterpret_cast<const uint4*>(source + Float8Tile::unit_offset(row, unit));
            const auto lower = [](uint32_t word) {
                return ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word));
            };
            const auto upper = [](uint32_t word) {
                return ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word >> 16));
            };
            low = make_uint4(lower(words.x), upper(words.x), lower(words.y), upper(words.y));
            high = make_uint4(lower(words.z), upper(words.z), lower(words.w), upper(words.w));
        }
        *reinterpret_cast<uint4*>(destination + Tile::unit_offset(row, 2 * unit)) = low;
        *reinterpret_cast<uint4*>(destination + Tile::unit_offset(row, 2 * unit + 1)) = high;
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
