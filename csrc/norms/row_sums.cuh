#pragma once

#include <cstdint>

#include "common/reduce.cuh"
#include "norms/arch.h"
#include "ptx/cluster.cuh"
#include "ptx/cluster_grid.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_address.cuh"

namespace flash_attn_norm {

constexpr int kMaxRowWarps = 16;  // of one CTA

/// Shared memory of RowReducer. Rows take turns with the sets of sums: see RowReducer.
template <class Arch>
struct RowSumStorage {
    static constexpr int kSets = Arch::kHasClusters ? 4 : 2;
    static constexpr int kMaxSums = Arch::kMaxClusterSize * kMaxRowWarps;
    float warp_sums[kSets][3][kMaxSums];
    uint64_t barriers[kSets];
};

/// How many elements there are, their sum, and the sum of the squares of their distances to their
/// own mean: what two sets of elements have together follows from what each has, without the loss
/// of squares minus a squared mean (Chan, Golub and LeVeque, "Algorithms for Computing the Sample
/// Variance", 1983).
struct RowMoments {
    float count = 0.0f;
    float sum = 0.0f;
    float squares = 0.0f;

    /// is_even: both have as many elements. Both give the same bits whichever of the two is first,
    /// so that all lanes of a row end with the same.
    __device__ __forceinline__ void add(const RowMoments& other, bool is_even) {
        squares += other.squares;
        if (is_even) {
            const float distance = sum - other.sum;
            squares = fmaf(distance * __fdividef(0.5f, count), distance, squares);
        } else {
            const float distance =
                __fmul_rn(sum, inverse(count)) - __fmul_rn(other.sum, inverse(other.count));
            const float weight = count * other.count * inverse(count + other.count);
            squares = fmaf(distance * weight, distance, squares);
        }
        sum += other.sum;
        count += other.count;
    }

    __device__ __forceinline__ static float inverse(float count) {
        return count > 0.0f ? __fdividef(1.0f, count) : 0.0f;
    }
};

/// Sums over the threads that work on one row: threadIdx.x of blockDim.x threads in each of
/// blockDim.y row slots, in each CTA of a cluster. blockDim.x is a power of two below 32 or a
/// multiple of 32 up to 512; a cluster has one row slot. The order of additions is fixed.
///
/// send(), sync() and receive() are called by all threads for one row after the other. The next row
/// may be sent before a row is received, so that other work hides what the exchange takes:
///     send(0)  sync  send(1) receive(0)  sync  send(2) receive(1)  sync ...
/// In a cluster, whoever sends row n + 2 has received row n, so all threads have sent n and
/// received n - 2: four sets of sums are enough. In one CTA sync() is a barrier, and two are.
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
            ptx::cluster_arrive_relaxed();  // the fence has released the barriers
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
    __device__ int block() const {
        return Arch::kHasClusters ? ptx::cluster_id() : static_cast<int>(blockIdx.x);
    }
    __device__ int num_blocks() const {
        return Arch::kHasClusters ? ptx::num_clusters() : static_cast<int>(gridDim.x);
    }
    /// This CTA's part of `items` of a row, rounded up. Cluster sizes are powers of two.
    __device__ int part_of_cta(int items) const {
        return Arch::kHasClusters ? (items + cluster_size_ - 1) >> (__ffs(cluster_size_) - 1)
                                  : items;
    }

    /// A thread's part of kCount sums of a row. Where a warp has the whole row, they are the sums
    /// afterwards.
    template <int kCount>
    __device__ __forceinline__ void send(float (&values)[kCount]) {
        over_lanes([&](int offset) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] += from_lane(values[i], offset);
        });
        send_from_warp(values);
    }

    /// The same for moments. is_even: every thread of the row has as many elements.
    __device__ __forceinline__ void send(RowMoments& moments, bool is_even) {
        over_lanes([&](int offset) {
            RowMoments other;
            other.count = is_even ? moments.count : from_lane(moments.count, offset);
            other.sum = from_lane(moments.sum, offset);
            other.squares = from_lane(moments.squares, offset);
            moments.add(other, is_even);
        });
        float values[3] = {moments.count, moments.sum, moments.squares};
        send_from_warp(values);
    }

    __device__ __forceinline__ void sync() {
        if (blockDim.x > 32 && !is_cluster()) __syncthreads();
    }

    /// The sums of the row that was sent first among those not received.
    template <int kCount>
    __device__ __forceinline__ void receive(float (&values)[kCount]) {
        if (blockDim.x <= 32) return;
        const int set = wait_for_set();
        over_warps(values, [&](int warp, int i) { return smem_.warp_sums[set][i][warp]; });
    }

    /// The sum and the squares of the row that was sent first among those not received.
    __device__ __forceinline__ void receive(RowMoments& moments, float inv_count) {
        if (blockDim.x <= 32) return;
        const int set = wait_for_set();
        float total[1];
        over_warps(total, [&](int warp, int) { return smem_.warp_sums[set][1][warp]; });
        const float mean = total[0] * inv_count;
        float squares[1];
        over_warps(squares, [&](int warp, int) {
            const float count = smem_.warp_sums[set][0][warp];
            const float sum = smem_.warp_sums[set][1][warp];
            const float distance = sum * RowMoments::inverse(count) - mean;
            return fmaf(distance * count, distance, smem_.warp_sums[set][2][warp]);
        });
        moments.sum = total[0];
        moments.squares = squares[0];
    }

    /// Sums kCount values over the threads of each row; every thread gets them.
    template <int kCount>
    __device__ __forceinline__ void sum(float (&values)[kCount]) {
        send(values);
        sync();
        receive(values);
    }

  private:
    __device__ __forceinline__ static float from_lane(float value, int offset) {
        return __shfl_xor_sync(0xffffffffu, value, offset);
    }

    /// step(offset) for each distance between lanes of one row, from the largest on.
    template <class Step>
    __device__ __forceinline__ static void over_lanes(const Step& step) {
        // Two branches for all steps where rows are long.
        if (blockDim.x >= 32) {
            step(16);
            step(8);
            step(4);
            step(2);
            step(1);
            return;
        }
        if (blockDim.x >= 16) step(8);
        if (blockDim.x >= 8) step(4);
        if (blockDim.x >= 4) step(2);
        if (blockDim.x >= 2) step(1);
    }

    /// Adds up part(warp, i) of each warp that has a part of the row.
    template <int kCount, class Part>
    __device__ __forceinline__ void over_warps(float (&values)[kCount], const Part& part) const {
        const int warps_per_row = blockDim.x / 32;
        const int first_warp = threadIdx.y * warps_per_row;
        const int num_sums = warps_per_row * cluster_size_;
        const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
        // Up to 16 sums are read by both halves of the warp, which saves a step.
        const int stride = num_sums <= 16 ? 16 : 32;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = 0.0f;
            if (num_sums <= 4) {  // fewer steps one after the other than shuffles take
#pragma unroll
                for (int warp = 0; warp < 4; ++warp) {
                    if (warp < num_sums) values[i] += part(first_warp + warp, i);
                }
                continue;
            }
            if (!Arch::kHasClusters) {
                if (lane % 16 < num_sums) values[i] = part(first_warp + lane % 16, i);
                continue;
            }
            for (int sum = lane % stride; sum < num_sums; sum += stride) {
                values[i] += part(first_warp + sum, i);
            }
        }
        if (num_sums <= 4) return;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            if (offset == 16 && (!Arch::kHasClusters || num_sums <= 16)) continue;
#pragma unroll
            for (int i = 0; i < kCount; ++i) values[i] += from_lane(values[i], offset);
        }
    }

    /// Lane 0's values to whoever needs them.
    template <int kCount>
    __device__ __forceinline__ void send_from_warp(const float (&values)[kCount]) {
        static_assert(kCount <= 3, "as many as RowSumStorage has room for");
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

    /// The set of the row that is received next, once it is there.
    __device__ __forceinline__ int wait_for_set() {
        const int set = num_received_ % RowSumStorage<Arch>::kSets;
        if (is_cluster()) {
            const uint32_t barrier = ptx::shared_address(&smem_.barriers[set]);
            while (
                !ptx::mbarrier_try_wait(barrier, num_received_ / RowSumStorage<Arch>::kSets % 2)) {
            }
        }
        ++num_received_;
        return set;
    }

    __device__ bool is_cluster() const { return Arch::kHasClusters && cluster_size_ > 1; }

    /// Each warp sends its sums to all CTAs, its own included.
    template <int kCount>
    __device__ __forceinline__ void send_to_cluster(int set, int lane,
                                                    const float (&values)[kCount]) {
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
