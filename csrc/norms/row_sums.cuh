#pragma once

#include <cstdint>

#include "common/reduce.cuh"
#include "norms/arch.h"
#include "ptx/cluster.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {

constexpr int kMaxRowWarps = 16;  // of one CTA

/// Shared memory of RowReducer. Rows take turns with the sets of sums: see RowReducer.
template <class Arch>
struct RowSumStorage {
    static constexpr int kSets = 4;
    static constexpr int kMaxSums = Arch::kMaxClusterSize * kMaxRowWarps;
    float warp_sums[kSets][2][kMaxSums];
    uint64_t barriers[kSets];
};

/// Sums over the threads that work on one row: threadIdx.x of blockDim.x threads in each of
/// blockDim.y row slots, in each CTA of a cluster. blockDim.x is a power of two below 32 or a
/// multiple of 32 up to 512; a cluster has one row slot. The order of additions is fixed.
///
/// send(), sync() and receive() are called by all threads for one row after the other. The next row
/// may be sent before a row is received, so that other work hides what the exchange takes:
///     send(0)  sync  send(1) receive(0)  sync  send(2) receive(1)  sync ...
/// In a cluster, whoever sends row n + 2 has received row n, so all threads have sent n and
/// received n - 2: four sets of sums are enough. In one CTA sync() is a barrier, and two would be.
template <class Arch>
class RowReducer {
  public:
    /// All threads of the cluster construct it, and call wait_for_cluster(), at the same points.
    __device__ explicit RowReducer(RowSumStorage<Arch>& smem) : smem_(smem) {
        if constexpr (Arch::kHasClusters) {
            cluster_rank_ = ptx::cluster_cta_rank();
            cluster_size_ = ptx::cluster_num_ctas();
            if (cluster_size_ == 1) return;
            if (threadIdx.x == 0) {
#pragma unroll
                for (int set = 0; set < RowSumStorage<Arch>::kSets; ++set) {
                    ptx::mbarrier_init(ptx::shared_address(&smem_.barriers[set]), 1);
                }
                ptx::fence_mbarrier_init();
            }
            ptx::cluster_arrive();
        }
    }

    /// Before the first send(): the other CTAs' barriers are there from then on.
    __device__ void wait_for_cluster() const {
        if constexpr (Arch::kHasClusters) {
            if (cluster_size_ > 1) ptx::cluster_wait();
        }
    }

    __device__ int cluster_rank() const { return cluster_rank_; }
    __device__ int cluster_size() const { return cluster_size_; }
    /// Which cluster of the grid this is, and how many there are.
    __device__ int block() const { return blockIdx.x / cluster_size_; }
    __device__ int num_blocks() const { return gridDim.x / cluster_size_; }

    /// A thread's part of kCount sums of a row. Where a warp has the whole row, they are the sums
    /// afterwards.
    template <int kCount>
    __device__ __forceinline__ void send(float (&values)[kCount]) {
        static_assert(kCount <= 2, "as many as RowSumStorage has room for");
        if (blockDim.x >= 32) {
            add_from_lanes<32>(values);
        } else if (blockDim.x >= 8) {  // one branch for all steps
            if (blockDim.x == 16) add_from_lanes<16>(values);
            if (blockDim.x == 8) add_from_lanes<8>(values);
        } else {
            if (blockDim.x == 4) add_from_lanes<4>(values);
            if (blockDim.x == 2) add_from_lanes<2>(values);
        }
        if (blockDim.x <= 32) return;
        const int set = num_sent_++ % RowSumStorage<Arch>::kSets;
        const int thread = threadIdx.y * blockDim.x + threadIdx.x;
        const int lane = thread % 32;
        if (is_cluster()) {
            send_to_cluster(set, lane, values);
        } else if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) smem_.warp_sums[set][i][thread / 32] = values[i];
        }
    }

    __device__ __forceinline__ void sync() {
        if (blockDim.x > 32 && !is_cluster()) __syncthreads();
    }

    /// The sums of the row that was sent first among those not received.
    template <int kCount>
    __device__ __forceinline__ void receive(float (&values)[kCount]) {
        if (blockDim.x <= 32) return;
        const int set = num_received_ % RowSumStorage<Arch>::kSets;
        if (is_cluster()) {
            const uint32_t barrier = ptx::shared_address(&smem_.barriers[set]);
            while (
                !ptx::mbarrier_try_wait(barrier, num_received_ / RowSumStorage<Arch>::kSets % 2)) {
            }
        }
        ++num_received_;
        const int warps_per_row = blockDim.x / 32;
        const int first_warp = threadIdx.y * warps_per_row;
        const int num_sums = warps_per_row * cluster_size_;
        const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float* sums = smem_.warp_sums[set][i];
            values[i] = 0.0f;
            if (num_sums <= 4) {  // fewer steps one after the other than shuffles take
#pragma unroll
                for (int warp = 0; warp < 4; ++warp) {
                    if (warp < num_sums) values[i] += sums[first_warp + warp];
                }
                continue;
            }
            // Up to 16 sums are read by both halves of the warp, which saves a step.
            const int stride = num_sums <= 16 ? 16 : 32;
            for (int sum = lane % stride; sum < num_sums; sum += stride) {
                values[i] += sums[first_warp + sum];
            }
        }
        if (num_sums <= 4) return;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            if (offset == 16 && num_sums <= 16) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
            }
        }
    }

    /// Sums kCount values over the threads of each row; every thread gets them.
    template <int kCount>
    __device__ __forceinline__ void sum(float (&values)[kCount]) {
        send(values);
        sync();
        receive(values);
    }

  private:
    /// Sums over each kWidth neighbouring lanes.
    template <int kWidth, int kCount>
    __device__ __forceinline__ static void add_from_lanes(float (&values)[kCount]) {
#pragma unroll
        for (int offset = kWidth / 2; offset > 0; offset /= 2) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                values[i] += __shfl_xor_sync(0xffffffffu, values[i], offset);
            }
        }
    }

    __device__ bool is_cluster() const { return Arch::kHasClusters && cluster_size_ > 1; }

    /// Each warp sends its sums to all CTAs, its own included.
    template <int kCount>
    __device__ __forceinline__ void send_to_cluster(int set, int lane, float (&values)[kCount]) {
        if constexpr (Arch::kHasClusters) {
            const int warps = blockDim.x / 32;
            const uint32_t barrier = ptx::shared_address(&smem_.barriers[set]);
            if (threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect_tx(
                    barrier, cluster_size_ * warps * kCount * static_cast<int>(sizeof(float)));
            }
            if (lane >= cluster_size_) return;
            const int place = cluster_rank_ * warps + threadIdx.x / 32;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const uint32_t slot = ptx::shared_address(&smem_.warp_sums[set][i][place]);
                ptx::st_async(ptx::mapa(slot, lane), values[i], ptx::mapa(barrier, lane));
            }
        }
    }

    RowSumStorage<Arch>& smem_;
    int cluster_rank_ = 0;
    int cluster_size_ = 1;
    uint32_t num_sent_ = 0;
    uint32_t num_received_ = 0;
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
