#pragma once

#include <cstdint>

#include "common/reduce.cuh"
#include "norms/arch.h"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {

constexpr int kMaxClusterSize = 8;

/// Shared memory of RowReducer. Two sets, used in turn, so that one barrier a call is enough.
struct RowSumStorage {
    float warp_sums[2][2][32];
    float cta_sums[2][2][kMaxClusterSize];
    uint64_t barriers[2];
};

/// Sums over the threads that work on one row: threadIdx.x of blockDim.x threads in each of
/// blockDim.y row slots, in each CTA of a cluster. blockDim.x is a power of two below 32 or a
/// multiple of 32; a cluster has one row slot.
template <class Arch>
class RowReducer {
  public:
    /// All threads of the cluster construct it at the same point.
    __device__ explicit RowReducer(RowSumStorage& smem) : smem_(smem) {
        if constexpr (Arch::kHasClusters) {
            cluster_rank_ = ptx::cluster_cta_rank();
            cluster_size_ = ptx::cluster_num_ctas();
            if (cluster_size_ == 1) return;
            if (threadIdx.x == 0) {
                ptx::mbarrier_init(ptx::shared_address(&smem_.barriers[0]), 1);
                ptx::mbarrier_init(ptx::shared_address(&smem_.barriers[1]), 1);
                ptx::fence_mbarrier_init();
            }
            ptx::cluster_arrive();
            ptx::cluster_wait();
        }
    }

    __device__ int cluster_rank() const { return cluster_rank_; }
    __device__ int cluster_size() const { return cluster_size_; }
    /// Which cluster of the grid this is, and how many there are.
    __device__ int block() const { return blockIdx.x / cluster_size_; }
    __device__ int num_blocks() const { return gridDim.x / cluster_size_; }

    /// Sums kCount values over the threads of each row; every thread gets them. All threads call
    /// it. The order of additions is fixed.
    template <int kCount>
    __device__ void sum(float (&values)[kCount]) {
        if (blockDim.x <= 32) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] = group_sum(values[i], blockDim.x);
            return;
        }
        if constexpr (kCount <= 2) {
            sum_warps(values);
            if constexpr (Arch::kHasClusters) {
                if (cluster_size_ > 1) sum_ctas(values);
            }
            ++num_calls_;
        }
    }

  private:
    template <int kCount>
    __device__ void sum_warps(float (&values)[kCount]) {
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        const int warps_per_row = blockDim.x / 32;
        const int first_warp = threadIdx.y * warps_per_row;
        const int lane = thread % 32;
        float (&slots)[2][32] = smem_.warp_sums[num_calls_ % 2];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float warp_total = warp_sum(values[i]);
            if (lane == 0) slots[i][thread / 32] = warp_total;
        }
        __syncthreads();
        if (warps_per_row <= 4) {  // fewer steps one after the other than shuffles take
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] = 0.0f;
#pragma unroll
                for (int warp = 0; warp < 4; ++warp) {
                    if (warp < warps_per_row) values[i] += slots[i][first_warp + warp];
                }
            }
        } else {
            const int width = warps_per_row <= 8 ? 8 : warps_per_row <= 16 ? 16 : 32;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const int warp = lane % width;
                values[i] =
                    group_sum(warp < warps_per_row ? slots[i][first_warp + warp] : 0.0f, width);
            }
        }
    }

    /// Each CTA sends its sums to all, itself included. A CTA can send for the call after next
    /// only when it has got this one's sums for the next, which this one sends after its threads
    /// have passed sum_warps' barrier: so no slot is overwritten before it has been read.
    template <int kCount>
    __device__ void sum_ctas(float (&values)[kCount]) {
        const int set = num_calls_ % 2;
        const uint32_t barrier = ptx::shared_address(&smem_.barriers[set]);
        if (threadIdx.x == 0) {
            ptx::mbarrier_arrive_expect_tx(barrier, cluster_size_ * kCount * sizeof(float));
        }
        if (threadIdx.x < cluster_size_) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const uint32_t slot = ptx::shared_address(&smem_.cta_sums[set][i][cluster_rank_]);
                ptx::st_async(ptx::mapa(slot, threadIdx.x), values[i],
                              ptx::mapa(barrier, threadIdx.x));
            }
        }
        while (!ptx::mbarrier_try_wait(barrier, num_calls_ / 2 % 2)) {
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = 0.0f;
            for (uint32_t rank = 0; rank < cluster_size_; ++rank) {
                values[i] += smem_.cta_sums[set][i][rank];
            }
        }
    }

    RowSumStorage& smem_;
    uint32_t cluster_rank_ = 0;
    uint32_t cluster_size_ = 1;
    uint32_t num_calls_ = 0;
};

/// Before the first access to memory that an earlier kernel may have written.
template <class Arch>
__device__ __forceinline__ void wait_for_earlier_kernels() {
    if constexpr (Arch::kHasGridDependency) {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
    }
}

}  // namespace flash_attn_norm
