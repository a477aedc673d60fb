#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "ptx/float8.cuh"

namespace flash_attn_norm {
namespace decode {

/// Byte offset of unit `first` + kUnit of a row, from that of unit `first`, where both numbers have
/// no bit in common: the swizzle permutes units by XOR, so that a thread needs one address for all
/// of its units.
template <class Tile>
FAN_HOST_DEVICE constexpr int unit_from(int offset_of_first, int unit) {
    return (offset_of_first ^ unit % Tile::kUnitsPerRow * 16) +
           unit / Tile::kUnitsPerRow * Tile::kChunkBytes;
}

/// Rows [begin, end) of a tile of e4m3 numbers, as the copy engine has brought it, to a tile of
/// float16 of as many columns; zeros in place of the other rows. Eight neighbouring threads take
/// one unit of eight rows, which lie in different banks; several units are read before the first
/// one is converted.
template <class Float8Tile, class Tile, int kThreads>
__device__ __forceinline__ void convert_float8_tile(const unsigned char* source,
                                                    unsigned char* destination, int begin, int end,
                                                    int thread) {
    constexpr int kRows = Tile::kRows, kRowThreads = kThreads / kRows;
    constexpr int kUnits = Tile::kColumns / 16 / kRowThreads;  // of a thread
    constexpr int kAhead = kUnits % 3 == 0 ? 3 : (kUnits % 2 == 0 ? 2 : kUnits);
    static_assert(Float8Tile::kRows == kRows && 2 * Float8Tile::kColumns == Tile::kColumns,
                  "the same numbers");
    static_assert(kThreads % kRows == 0 && kUnits * kRowThreads * 16 == Tile::kColumns &&
                      (kRowThreads & (kRowThreads - 1)) == 0 &&
                      kRowThreads <= Float8Tile::kUnitsPerRow,
                  "see unit_from");
    const int row = thread % kRows, first = thread / kRows;
    const int from = Float8Tile::unit_offset(row, first), to = Tile::unit_offset(row, 2 * first);
    const uint32_t seen = row >= begin && row < end ? 0xffffffffu : 0u;
#pragma unroll
    for (int i = 0; i < kUnits; i += kAhead) {
        uint4 words[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            words[j] = *reinterpret_cast<const uint4*>(
                source + unit_from<Float8Tile>(from, (i + j) * kRowThreads));
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const auto lower = [&](uint32_t word) {
                return ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word)) & seen;
            };
            const auto upper = [&](uint32_t word) {
                return ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word >> 16)) & seen;
            };
            const uint4& four = words[j];
            const int unit = 2 * (i + j) * kRowThreads;
            *reinterpret_cast<uint4*>(destination + unit_from<Tile>(to, unit)) =
                make_uint4(lower(four.x), upper(four.x), lower(four.y), upper(four.y));
            *reinterpret_cast<uint4*>(destination + unit_from<Tile>(to ^ 16, unit)) =
                make_uint4(lower(four.z), upper(four.z), lower(four.w), upper(four.w));
        }
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
