#pragma once

#include "attention/bwd_passes.h"
#include "attention/element.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/streaming_load.cuh"

namespace flash_attn_norm {

constexpr int kLargestRoundThreads = 512;

/// A row of a rounded tile in shared memory is longer by 8 elements than in the tile, so that rows
/// start in different banks.
FAN_HOST_DEVICE int rounded_tile_pitch(const AccumulatorLayout& layout) {
    return layout.columns + 8;
}

inline int rounded_tile_bytes(const AccumulatorLayout& layout) {
    return layout.rows * rounded_tile_pitch(layout) * 2;
}

/// One thread's place in a tile of sums, and what it writes of the rounded one.
template <class Element>
struct RoundedTile {
    uint16_t* rows;  // in shared memory
    int pitch;
    float scale;
    bool transposed;
    int row, column;  // of the thread's entry 0

    __device__ static RoundedTile make(uint16_t* rows, const GradientTiles& tiles, int thread) {
        const AccumulatorLayout& layout = tiles.layout;
        const int lane = thread % 32, warp = thread / 32;
        const int column_in_warp = 2 * (lane % 4);
        RoundedTile tile{rows, rounded_tile_pitch(layout), tiles.scale, layout.transposed, 0, 0};
        if (layout.transposed) {
            tile.row = column_in_warp;
            tile.column = warp * 16 + lane / 4;
        } else {
            tile.row = warp % layout.warps_rows * layout.tiles_rows * 16 + lane / 4;
            tile.column = warp / layout.warps_rows * layout.tiles_columns * 8 + column_in_warp;
        }
        return tile;
    }

    /// The four sums of the thread in its warp's tile (m, n) of 16 x 8.
    __device__ void put(int m, int n, const float4& sums) const {
        const uint32_t low = Element::pack(sums.x * scale, sums.y * scale);
        const uint32_t high = Element::pack(sums.z * scale, sums.w * scale);
        if (transposed) {
            uint16_t* place = rows + (row + 8 * n) * pitch + column;
            place[0] = static_cast<uint16_t>(low);
            place[pitch] = static_cast<uint16_t>(low >> 16);
            place[8] = static_cast<uint16_t>(high);
            place[pitch + 8] = static_cast<uint16_t>(high >> 16);
            return;
        }
        uint16_t* place = rows + (row + 16 * m) * pitch + column + 8 * n;
        *reinterpret_cast<uint32_t*>(place) = low;
        *reinterpret_cast<uint32_t*>(place + 8 * pitch) = high;
    }
};

/// Transposes one tile of sums from register order to rows, through shared memory. kHopper: sums
/// of a kernel of capability 9.0, AccumulatorLayout::vector = 4, after which this is a dependent
/// launch; otherwise vector = 1.
template <class Element, bool kHopper>
__global__ void __launch_bounds__(kLargestRoundThreads)
    round_kernel(const __grid_constant__ AttentionProblem problem,
                 const __grid_constant__ GradientTiles tiles) {
    extern __shared__ __align__(16) uint16_t shared_tile[];
    const AccumulatorLayout& layout = tiles.layout;
    const BlockSlots slots = tiles.of_queries ? BlockSlots::queries(problem, layout.rows)
                                              : BlockSlots::keys(problem, layout.rows);
    const PassTile place = PassTile::of(blockIdx.x, tiles.num_heads, slots.count());
    const int64_t batch = slots.batch_of(place.slot);
    const int64_t first_row = (place.slot - slots.first_slot(batch)) * layout.rows;
    const SeqlenInfo info = seqlen_info_or_uncovered(problem, batch, tiles.of_queries);
    const int64_t seqlen = tiles.of_queries ? info.seqlen_q : info.seqlen_k;
    // Before any return: a kernel that nobody waited in might end before the one ahead of it.
    if constexpr (kHopper) ptx::griddepcontrol_wait();
    if (first_row < 0 || first_row >= seqlen) return;

    const int thread = static_cast<int>(threadIdx.x);
    const auto rounded = RoundedTile<Element>::make(shared_tile, tiles, thread);
    const float* sums = tiles.sums + place.index * layout.entries();
    if constexpr (kHopper) {
        constexpr int kAtOnce = 8;  // loads in flight
        const bool has_sums = tiles.parts == nullptr || __ldg(tiles.parts + place.index) != 0;
        const float4* entries = reinterpret_cast<const float4*>(sums) +
                                thread / 128 * (layout.tiles_columns * 128) + thread % 128;
        for (int n = 0; n < layout.tiles_columns; n += kAtOnce) {
            float4 batch_of_sums[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (n + i >= layout.tiles_columns) break;
                batch_of_sums[i] =
                    ptx::ld_global_cs(entries + (n + i) * 128);  // whether written or not
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (n + i >= layout.tiles_columns) break;
                rounded.put(0, n + i, has_sums ? batch_of_sums[i] : make_float4(0, 0, 0, 0));
            }
        }
    } else {
        sums += thread;
        for (int m = 0; m < layout.tiles_rows; ++m) {
#pragma unroll 4
            for (int n = 0; n < layout.tiles_columns; ++n) {
                const float* entry = sums + (m * layout.tiles_columns + n) * 4 * layout.threads;
                rounded.put(m, n,
                            make_float4(entry[0], entry[layout.threads], entry[2 * layout.threads],
                                        entry[3 * layout.threads]));
            }
        }
    }
    __syncthreads();

    const int64_t row_stride = int64_t{tiles.num_heads} * tiles.head_dim;
    const int64_t packed_row = tiles.of_queries
                                   ? info.batch * problem.seqlen_q + info.row_q + first_row
                                   : info.batch * problem.seqlen_k + info.row_k + first_row;
    uint16_t* gradient =
        tiles.gradient + packed_row * row_stride + int64_t{place.head} * tiles.head_dim;
    const int units = tiles.head_dim / 8;
    const int64_t left = seqlen - first_row;
    const int rows = static_cast<int>(left < layout.rows ? left : layout.rows);
    for (int i = thread; i < rows * units; i += layout.threads) {
        const int r = i / units, unit = i % units;
        *reinterpret_cast<uint4*>(gradient + r * row_stride + unit * 8) =
            *reinterpret_cast<const uint4*>(shared_tile + r * rounded.pitch + unit * 8);
    }
}

}  // namespace flash_attn_norm
