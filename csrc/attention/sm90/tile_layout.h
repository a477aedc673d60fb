#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash_attn_norm {
namespace sm90 {

/// How the copy engine and wgmma permute the 16-byte units of a row of shared memory: the unit's
/// number is XORed with bits of the row's, so that eight rows of one unit lie in different banks.
/// The value is the layout type of a matrix descriptor.
enum class Swizzle : uint32_t { k128Bytes = 1, k64Bytes = 2 };

/// A tile of kRows rows and kColumns columns of two-byte elements in shared memory, as the copy
/// engine writes it: chunks of 64 columns (32 where 64 do not divide kColumns) one after the other,
/// each [kRows][chunk columns] and swizzled over the length of a row. The tile's address is a
/// multiple of 1024.
template <int kRows_, int kColumns_>
struct TileLayout {
    static constexpr int kRows = kRows_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kChunkColumns = kColumns % 64 == 0 ? 64 : 32;
    static constexpr int kChunks = kColumns / kChunkColumns;
    static constexpr int kRowBytes = kChunkColumns * 2;
    static constexpr int kUnitsPerRow = kRowBytes / 16;  // of one chunk
    static constexpr int kChunkBytes = kRows * kRowBytes;
    static constexpr int kBytes = kChunks * kChunkBytes;
    static constexpr Swizzle kSwizzle =
        kChunkColumns == 64 ? Swizzle::k128Bytes : Swizzle::k64Bytes;
    static constexpr int kGroupBytes = 8 * kRowBytes;  // eight rows: the swizzle's period
    static_assert(kColumns % kChunkColumns == 0, "whole chunks");
    static_assert(kRows % 8 == 0, "whole groups of eight rows");

    /// XOR for the unit's number in `row`.
    FAN_HOST_DEVICE static constexpr int swizzle_bits(int row) {
        return kSwizzle == Swizzle::k128Bytes ? row & 7 : (row >> 1) & 3;
    }

    /// Byte offset of the 16 bytes that hold columns 8 * unit.. of `row`.
    FAN_HOST_DEVICE static constexpr int unit_offset(int row, int unit) {
        return unit / kUnitsPerRow * kChunkBytes + row * kRowBytes +
               ((unit % kUnitsPerRow) ^ swizzle_bits(row)) * 16;
    }

    /// Byte offset of step k, 16 columns, of a product that contracts over the columns.
    FAN_HOST_DEVICE static constexpr int column_step_offset(int k) {
        return k * 16 / kChunkColumns * kChunkBytes + k * 16 % kChunkColumns * 2;
    }

    /// Byte offset of step k, 16 rows, of a product that contracts over the rows.
    FAN_HOST_DEVICE static constexpr int row_step_offset(int k) { return k * 16 * kRowBytes; }

    /// The matrix descriptor (PTX ISA, "Matrix Descriptor Format" of wgmma) of the operand that
    /// starts at `address`, contracted over its columns (Major::kContraction). Add a byte offset
    /// divided by 16 for another step.
    FAN_HOST_DEVICE static constexpr uint64_t column_descriptor(uint32_t address) {
        return descriptor(address, /*leading_bytes=*/16);  // ignored within one swizzled row
    }

    /// The same, contracted over its rows (Major::kOuter): the leading offset leads to the next
    /// chunk of columns.
    FAN_HOST_DEVICE static constexpr uint64_t row_descriptor(uint32_t address) {
        return descriptor(address, kChunkBytes);
    }

  private:
    FAN_HOST_DEVICE static constexpr uint64_t descriptor(uint32_t address, uint32_t leading_bytes) {
        return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
               static_cast<uint64_t>(leading_bytes >> 4) << 16 |
               static_cast<uint64_t>(kGroupBytes >> 4) << 32 |
               static_cast<uint64_t>(kSwizzle) << 62;
    }
};

}  // namespace sm90
}  // namespace flash_attn_norm
