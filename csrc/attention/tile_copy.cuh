#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/tile_pitch.h"
#include "ptx/cp_async.cuh"
#include "ptx/opaque.cuh"

namespace flash_attn_norm {

/// How the threads of a CTA share the 16-byte units of a [kRows][kColumns] tile of 16-bit elements:
/// kThreadsPerRow neighbours take one row (64 or 128 contiguous bytes at a time), then the CTA
/// steps down by kRowStep rows.
template <int kRows, int kColumns, int kThreads>
struct TileMap {
    static constexpr int kThreadsPerRow = kColumns % 64 == 0 ? 8 : 4;
    static constexpr int kUnits = kColumns / 8 / kThreadsPerRow;  // per thread and row
    static constexpr int kRowStep = kThreads / kThreadsPerRow;
    static constexpr int kSteps = (kRows + kRowStep - 1) / kRowStep;
    static constexpr bool kEven = kRows % kRowStep == 0;
    static constexpr int kPitch = pitch_of(kColumns);
    static_assert(kColumns % (8 * kThreadsPerRow) == 0, "columns split evenly");
};

/// Copies a tile to shared memory step by step, kRowStep rows at a time, so that the caller can
/// spread the steps among other work: a burst of copies would block the queue that it shares with
/// ldmatrix. (Smaller steps than whole rows are slower: measured in docs/portable_attention.md.)
/// The caller commits.
template <int kRows, int kColumns, int kThreads>
struct TileLoader {
    using Map = TileMap<kRows, kColumns, kThreads>;
    static constexpr int kSteps = Map::kSteps;

    const uint16_t* source = nullptr;  // this thread's first unit of the row that comes next
    int64_t row_stride = 0;
    int units = 0;      // true columns in units of 8; the rest is filled with zeros and not read
    int rows_left = 0;  // of the tile, from this thread's first row on; likewise

    /// `tensor` is row 0, column 0.
    __device__ __forceinline__ TileLoader(const uint16_t* tensor, int64_t stride, int num_units)
        : source(tensor + static_cast<int>(threadIdx.x) / Map::kThreadsPerRow * stride +
                 static_cast<int>(threadIdx.x) % Map::kThreadsPerRow * 8),
          row_stride(stride),
          units(num_units) {}

    /// After the last step: to the tile of the rows before this one's.
    __device__ __forceinline__ void to_previous_tile() {
        static_assert(Map::kEven, "whole steps");
        source -= 2 * kRows * row_stride;
    }

    /// `rows`: those of the tensor from the tile's first one on.
    __device__ __forceinline__ void begin_tile(int rows) {
        rows_left = rows - static_cast<int>(threadIdx.x) / Map::kThreadsPerRow;
    }

    /// Steps go in order.
    __device__ __forceinline__ void step(int i, uint32_t tile) {
        const int first_row = static_cast<int>(threadIdx.x) / Map::kThreadsPerRow;
        const int first_unit = static_cast<int>(threadIdx.x) % Map::kThreadsPerRow;
        // One address per row, and constants along it: left alone, the compiler gives every copy an
        // address of its own, and such a register is busy until its copy has left the queue.
        ptx::make_opaque(source);
        if (Map::kEven || first_row + i * Map::kRowStep < kRows) {
#pragma unroll
            for (int u = 0; u < Map::kUnits; ++u) {
                const int unit = u * Map::kThreadsPerRow;
                const bool exists = i * Map::kRowStep < rows_left && first_unit + unit < units;
                ptx::cp_async_16(
                    tile + static_cast<uint32_t>(((first_row + i * Map::kRowStep) * Map::kPitch +
                                                  (first_unit + unit) * 8) *
                                                 2),
                    source + unit * 8, exists ? 16 : 0);
            }
        }
        source += Map::kRowStep * row_stride;
    }
};

/// Calls fn(i) for those of kCount calls that fall into slot `slot` when they are spread evenly
/// over kSlots slots.
template <int kCount, int kSlots, class Fn>
__device__ __forceinline__ void spread(int slot, Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i * kSlots / kCount == slot) fn(i);
    }
}

/// Starts the copy of a whole tile; the caller commits. Rows from `rows` on and units of 8 columns
/// from `units` on are filled with zeros and not read. `source` is row 0.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t destination, const uint16_t* source,
                                          int64_t row_stride, int rows, int units) {
    using Map = TileMap<kRows, kColumns, kThreads>;
    const int thread = static_cast<int>(threadIdx.x);
    const int first_row = thread / Map::kThreadsPerRow;
    const int first_unit = thread % Map::kThreadsPerRow;
    source += first_row * row_stride + first_unit * 8;
    destination += static_cast<uint32_t>((first_row * Map::kPitch + first_unit * 8) * 2);
    int row_limit[Map::kUnits];
#pragma unroll
    for (int u = 0; u < Map::kUnits; ++u) {
        row_limit[u] = first_unit + u * Map::kThreadsPerRow < units ? rows : 0;
    }
#pragma unroll
    for (int i = 0; i < Map::kSteps; ++i) {
        const int row = first_row + i * Map::kRowStep;
        if (Map::kEven || row < kRows) {
#pragma unroll
            for (int u = 0; u < Map::kUnits; ++u) {
                ptx::cp_async_16(
                    destination +
                        static_cast<uint32_t>(
                            (i * Map::kRowStep * Map::kPitch + u * Map::kThreadsPerRow * 8) * 2),
                    source + u * Map::kThreadsPerRow * 8, row < row_limit[u] ? 16 : 0);
            }
        }
        source += Map::kRowStep * row_stride;
    }
}

/// Stores the first `rows` rows and `units` units of 8 columns of a shared tile.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void store_tile(uint16_t* destination, int64_t row_stride,
                                           const uint16_t* tile, int rows, int units) {
    using Map = TileMap<kRows, kColumns, kThreads>;
    const int thread = static_cast<int>(threadIdx.x);
    const int first_unit = thread % Map::kThreadsPerRow;
    int row = thread / Map::kThreadsPerRow;
#pragma unroll
    for (int i = 0; i < Map::kSteps; ++i, row += Map::kRowStep) {
        if (row >= rows || !(Map::kEven || row < kRows)) break;
#pragma unroll
        for (int u = 0; u < Map::kUnits; ++u) {
            const int unit = first_unit + u * Map::kThreadsPerRow;
            if (unit < units) {
                *reinterpret_cast<uint4*>(destination + row * row_stride + unit * 8) =
                    *reinterpret_cast<const uint4*>(tile + row * Map::kPitch + unit * 8);
            }
        }
    }
}

/// Rounds a warp's accumulator tile into shared memory; `tile` is its first entry's place.
template <class Element, int kPitch, int kTilesM, int kTilesN>
__device__ __forceinline__ void accumulator_to_tile(uint16_t* tile,
                                                    const float (&acc)[kTilesM][kTilesN][4],
                                                    int lane) {
    uint16_t* mine = tile + (lane / 4) * kPitch + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                *reinterpret_cast<uint32_t*>(mine + (16 * m + 8 * r) * kPitch + 8 * n) =
                    Element::pack(acc[m][n][2 * r], acc[m][n][2 * r + 1]);
            }
        }
    }
}

}  // namespace flash_attn_norm
