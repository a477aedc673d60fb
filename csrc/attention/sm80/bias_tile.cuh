#pragma once

#include <cstdint>

#include "attention/bias.cuh"
#include "attention/tile_pitch.h"
#include "ptx/cp_async.cuh"
#include "ptx/opaque.cuh"

namespace flash_attn_norm {
namespace sm80 {

/// The bias of a tile of scores, in shared memory where the card has room for it and the bias has
/// rows that can be copied 16 or 4 bytes at a time. Its rows are 8 entries longer than the tile's,
/// so that lanes read different banks. Read entry by entry from global memory, a tile would occupy
/// the L1 for most of the time that its products take.
template <class Element, int kRows, int kColumns, int kThreads>
struct BiasTile {
    static constexpr int kPitch = pitch_of(kColumns);

    static constexpr int bytes(bool is_float32) { return kRows * kPitch * (is_float32 ? 4 : 2); }

    /// Starts the copy of the tile whose first score is (row, key), `unit` bytes at a time; the
    /// caller commits.
    static __device__ __forceinline__ void load(uint32_t tile, const Bias& bias, int unit, int row,
                                                int key) {
        if (bias.is_float32 && unit == 16) {
            load_units<float, 16>(tile, bias, row, key);
        } else if (bias.is_float32) {
            load_units<float, 4>(tile, bias, row, key);
        } else if (unit == 16) {
            load_units<uint16_t, 16>(tile, bias, row, key);
        } else {
            load_units<uint16_t, 4>(tile, bias, row, key);
        }
    }

    /// A lane's entries in one row: columns `column`, column + 1, column + 8, ... `tile` is null if
    /// there is no copy. (row, key) is the first of them in the sequence, (tile_row, tile_column)
    /// in the tile.
    template <int kTilesN>
    static __device__ __forceinline__ void read_row(float (&values)[kTilesN][2], const Bias& bias,
                                                    const unsigned char* tile, int tile_row,
                                                    int tile_column, int row, int key) {
        const int offset = tile_row * kPitch + tile_column;
        if (tile == nullptr && bias.is_float32) {
            bias.template read_row<Float32>(values, row, key);
        } else if (tile == nullptr) {
            bias.template read_row<Element>(values, row, key);
        } else if (bias.is_float32) {
            const float* source = reinterpret_cast<const float*>(tile) + offset;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                const float2 pair = *reinterpret_cast<const float2*>(source + 8 * n);
                values[n][0] = pair.x;
                values[n][1] = pair.y;
            }
        } else {
            const uint16_t* source = reinterpret_cast<const uint16_t*>(tile) + offset;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(source + 8 * n);
                values[n][0] = Element::to_float(static_cast<uint16_t>(pair));
                values[n][1] = Element::to_float(static_cast<uint16_t>(pair >> 16));
            }
        }
    }

  private:
    template <typename Storage, int kUnitBytes>
    static __device__ __forceinline__ void load_units(uint32_t tile, const Bias& bias, int row,
                                                      int key) {
        constexpr int kBytes = static_cast<int>(sizeof(Storage));
        constexpr int kUnit = kUnitBytes / kBytes;  // entries
        constexpr int kUnits = kColumns / kUnit;    // of a row
        constexpr int kRowStep = kThreads / kUnits;
        constexpr int kSteps = (kRows + kRowStep - 1) / kRowStep;
        // Made anew for every tile: kept over the loop, the addresses would cost registers there.
        int thread = static_cast<int>(threadIdx.x);
        ptx::make_opaque(thread);
        const int first_row = thread / kUnits;
        const int column = thread % kUnits * kUnit;
        const Storage* source = bias.entry<Storage>(row + first_row, key + column);
        const int left = bias.columns - key - column;
        const int bytes = left >= kUnit ? kUnitBytes : left > 0 ? left * kBytes : 0;
        const int rows = bias.rows - row - first_row;
        tile += static_cast<uint32_t>((first_row * kPitch + column) * kBytes);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (kRows % kRowStep != 0 && first_row + i * kRowStep >= kRows) break;
            const uint32_t place = tile + static_cast<uint32_t>(i * kRowStep * kPitch * kBytes);
            const int existing = i * kRowStep < rows ? bytes : 0;
            if constexpr (kUnitBytes == 16) {
                ptx::cp_async_16(place, source + i * kRowStep * bias.row_stride, existing);
            } else {
                ptx::cp_async_4(place, source + i * kRowStep * bias.row_stride, existing);
            }
        }
    }
};

/// The largest of 16 and 4 bytes that every row of the bias begins at a multiple of; 0: neither.
inline int bias_unit_bytes(const AttentionProblem& problem) {
    const int64_t entry = problem.attn_bias_dtype == DType::kFloat32 ? 4 : 2;
    const BiasStrides& strides = problem.attn_bias_strides;
    const auto aligned = [&](int unit) {
        return reinterpret_cast<uintptr_t>(problem.attn_bias) % static_cast<uintptr_t>(unit) == 0 &&
               strides.batch * entry % unit == 0 && strides.head * entry % unit == 0 &&
               strides.row * entry % unit == 0;
    };
    return aligned(16) ? 16 : aligned(4) ? 4 : 0;
}

}  // namespace sm80
}  // namespace flash_attn_norm
