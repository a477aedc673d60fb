#include <algorithm>

#include "attention/sm90/dependent_launch.h"
#include "attention/sm90/fwd_launch.h"
#include "attention/sm90/fwd_tile_list.h"
#include "common/check.h"
#include "ptx/grid_dependency.cuh"

namespace flash_attn_norm {
namespace sm90 {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

/// Sums over the warp's lanes up to this one.
__device__ __forceinline__ int2 inclusive_scan(int2 value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int x = __shfl_up_sync(0xffffffffu, value.x, step);
        const int y = __shfl_up_sync(0xffffffffu, value.y, step);
        if (lane >= step) {
            value.x += x;
            value.y += y;
        }
    }
    return value;
}

/// The ends of kThreads consecutive sequences in either list, counted from the first one's begin.
struct TileEnds {
    int in_long[kThreads];
    int in_short[kThreads];
    int2 warps[kWarps];

    __device__ __forceinline__ void scan(const TileCounts& counts, int thread) {
        const int lane = thread % 32, warp = thread / 32;
        int2 sum = inclusive_scan(make_int2(counts.in_long, counts.in_short), lane);
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        if (warp == 0) warps[lane] = inclusive_scan(warps[lane], lane);
        __syncthreads();
        if (warp > 0) {
            sum.x += warps[warp - 1].x;
            sum.y += warps[warp - 1].y;
        }
        in_long[thread] = sum.x;
        in_short[thread] = sum.y;
        __syncthreads();
    }
};

/// Every thread writes tiles of its own, whichever sequences they belong to: one sequence may have
/// all of them.
__device__ __forceinline__ void write_tiles(const int (&ends)[kThreads], int first_sequence,
                                            PackedTile* tiles, int room, int thread) {
    const int count = min(ends[kThreads - 1], room);
    for (int i = thread; i < count; i += kThreads) {
        int low = 0, high = kThreads - 1;  // the first sequence that ends behind tile i
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > i) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        tiles[i] = PackedTile{first_sequence + low, i - (low > 0 ? ends[low - 1] : 0)};
    }
}

/// One CTA. Sequence batch_size are the rows that no other one covers.
__global__ void __launch_bounds__(kThreads)
    list_packed_tiles_kernel(const AttentionProblem problem, const FwdTileLists lists) {
    __shared__ TileEnds ends;
    // The kernels that take the tiles may set themselves up meanwhile.
    ptx::griddepcontrol_launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    const int sequences = static_cast<int>(problem.batch_size) + 1;
    int num_long = 0, num_short = 0;
    for (int first = 0; first < sequences; first += kThreads) {
        TileCounts counts;
        if (first + thread < sequences) {
            counts = tile_counts(problem, first + thread, lists.block_m, lists.short_rows,
                                 lists.least_rows);
        }
        ends.scan(counts, thread);
        write_tiles(ends.in_long, first, lists.long_tiles + num_long, lists.capacity - num_long,
                    thread);
        write_tiles(ends.in_short, first, lists.short_tiles + num_short, lists.capacity - num_short,
                    thread);
        // cu_seqlens that do not ascend may ask for more tiles than there are rows for.
        num_long = min(num_long + ends.in_long[kThreads - 1], lists.capacity);
        num_short = min(num_short + ends.in_short[kThreads - 1], lists.capacity);
        __syncthreads();
    }
    if (thread == 0) {
        *lists.counter = 0;
        lists.counts[0] = num_long;
        lists.counts[1] = num_short;
    }
}

__global__ void __launch_bounds__(1) reset_tile_counter_kernel(int* counter) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    *counter = 0;
}

}  // namespace

void reset_tile_counter(int* counter, cudaStream_t stream) {
    launch_dependent(reset_tile_counter_kernel, 1, 1, 0, stream, "attention forward's counter",
                     counter);
}

void list_packed_tiles(const AttentionProblem& problem, const FwdTileLists& lists,
                       cudaStream_t stream) {
    list_packed_tiles_kernel<<<1, kThreads, 0, stream>>>(problem, lists);
    check_launch("attention forward's tiles");
}

}  // namespace sm90
}  // namespace flash_attn_norm
