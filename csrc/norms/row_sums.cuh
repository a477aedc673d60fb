#pragma once

#include <cstddef>
#include <cstdint>

#include "norms/arch.h"
#include "ptx/cluster.cuh"
#include "ptx/cluster_grid.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared_address.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/shared_words.cuh"

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
    __device__ explicit RowReducer(RowSumStorage<Arch>& smem)
        : thread_(threadIdx.y * blockDim.x + threadIdx.x),
          sums_(static_cast<int>(ptx::shared_address(&smem))) {
        ptx::make_opaque(sums_);  // not derived again each row
        if constexpr (Arch::kHasClusters) {
            cluster_size_ = ptx::cluster_num_ctas();
            if (cluster_size_ == 1) return;
            if (threadIdx.x == 0) {
#pragma unroll
                for (int set = 0; set < RowSumStorage<Arch>::kSets; ++set) {
                    ptx::mbarrier_init(barrier_of(set), 1);
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

    /// Read each time: a register for it would be spilled.
    __device__ int cluster_rank() const {
        return Arch::kHasClusters ? static_cast<int>(ptx::cluster_cta_rank()) : 0;
    }
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

    /// A thread's part of a sum of a row. Where a warp has the whole row, it is the sum afterwards.
    __device__ __forceinline__ void send(float (&values)[1]) {
        over_lanes([&](int offset) { values[0] += from_lane(values[0], offset); });
        if (blockDim.x <= 32) return;
        const int set = next_set_to_send(1);
        store(set, 0, values[0], thread_ % 32);
    }

    /// The same for two sums. After the first step each half of a warp adds up one of them.
    __device__ __forceinline__ void send(float (&values)[2]) {
        if (blockDim.x < 32) {
            over_lanes([&](int offset) {
                values[0] += from_lane(values[0], offset);
                values[1] += from_lane(values[1], offset);
            });
            return;
        }
        const bool is_upper = thread_ & 16;
        float own = is_upper ? values[1] : values[0];
        own += from_lane(is_upper ? values[0] : values[1], 16);
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) own += from_lane(own, offset);
        if (blockDim.x == 32) return give_both(own, values);
        const int set = next_set_to_send(2);
        store(set, is_upper ? 1 : 0, own, thread_ % 16);
    }

    /// The same for moments. is_even: every thread of the row has as many elements.
    __device__ __forceinline__ void send(RowMoments& moments, bool is_even) {
        const auto add_lane = [&](int offset, bool is_even) {
            RowMoments other;
            other.count = is_even ? moments.count : from_lane(moments.count, offset);
            other.sum = from_lane(moments.sum, offset);
            other.squares = from_lane(moments.squares, offset);
            moments.add(other, is_even);
        };
        if (is_even) {  // one branch a row, not one a step
            over_lanes([&](int offset) { add_lane(offset, true); });
        } else {
            over_lanes([&](int offset) { add_lane(offset, false); });
        }
        if (blockDim.x <= 32) return;
        const int set = next_set_to_send(3);
        store(set, 0, moments.count, thread_ % 32);
        store(set, 1, moments.sum, thread_ % 32);
        store(set, 2, moments.squares, thread_ % 32);
    }

    __device__ __forceinline__ void sync() {
        if (blockDim.x > 32 && !is_cluster()) __syncthreads();
    }

    /// The sum of the row that was sent first among those not received.
    __device__ __forceinline__ void receive(float (&values)[1]) {
        if (blockDim.x <= 32) return;
        const int set = wait_for_set();
        values[0] = over_warps([&](int warp) { return load(set, 0, warp); });
    }

    /// The same for two sums: each half of a warp adds up one of them.
    __device__ __forceinline__ void receive(float (&values)[2]) {
        if (blockDim.x <= 32) return;
        const int set = wait_for_set();
        const int num_sums = sums_of_row();
        const int first = first_warp();
        const int index = thread_ & 16 ? 1 : 0;
        float own = 0.0f;
        if (num_sums <= 4) {
            if (thread_ % 4 < num_sums) own = load(set, index, first + thread_ % 4);
        } else {
            if (thread_ % 16 < num_sums) own = load(set, index, first + thread_ % 16);
            if (Arch::kHasClusters) {
                for (int sum = thread_ % 16 + 16; sum < num_sums; sum += 16) {
                    own += load(set, index, sum);
                }
            }
            own += from_lane(own, 8);
            own += from_lane(own, 4);
        }
        own += from_lane(own, 2);
        own += from_lane(own, 1);
        give_both(own, values);
    }

    /// The sum and the squares of the row that was sent first among those not received.
    __device__ __forceinline__ void receive(RowMoments& moments, float inv_count) {
        if (blockDim.x <= 32) return;
        const int set = wait_for_set();
        moments.sum = over_warps([&](int warp) { return load(set, 1, warp); });
        const float mean = __fmul_rn(moments.sum, inv_count);
        moments.squares = over_warps([&](int warp) {
            const float count = load(set, 0, warp);
            const float distance = fmaf(load(set, 1, warp), RowMoments::inverse(count), -mean);
            return fmaf(distance * count, distance, load(set, 2, warp));
        });
    }

    /// Sums kCount values over the threads of each row; every thread gets them.
    template <int kCount>
    __device__ __forceinline__ void sum(float (&values)[kCount]) {
        send(values);
        sync();
        receive(values);
    }

  private:
    using Storage = RowSumStorage<Arch>;

    __device__ __forceinline__ static float from_lane(float value, int offset) {
        return __shfl_xor_sync(0xffffffffu, value, offset);
    }

    /// Both sums to all lanes of a warp whose halves have one each.
    __device__ __forceinline__ void give_both(float own, float (&values)[2]) const {
        const float other = from_lane(own, 16);
        values[0] = thread_ & 16 ? other : own;
        values[1] = thread_ & 16 ? own : other;
    }

    /// step(offset) for each distance between lanes of one row, from the largest on.
    template <class Step>
    __device__ __forceinline__ static void over_lanes(const Step& step) {
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

    __device__ __forceinline__ int sums_of_row() const { return blockDim.x / 32 * cluster_size_; }
    __device__ __forceinline__ int first_warp() const { return threadIdx.y * (blockDim.x / 32); }

    /// Adds up part(warp) of each warp that has a part of the row.
    template <class Part>
    __device__ __forceinline__ float over_warps(const Part& part) const {
        const int num_sums = sums_of_row();
        const int first = first_warp();
        float value = 0.0f;
        if (num_sums <= 4) {   // fewer steps one after the other than shuffles take
            float odd = 0.0f;  // the order of the shuffles in receive() of two sums
#pragma unroll
            for (int warp = 0; warp < 4; ++warp) {
                if (warp < num_sums) (warp % 2 == 0 ? value : odd) += part(first + warp);
            }
            return value + odd;
        }
        // Up to 16 sums are read by both halves of the warp, which saves a step.
        if (!Arch::kHasClusters || num_sums <= 16) {
            if (thread_ % 16 < num_sums) value = part(first + thread_ % 16);
        } else {
            for (int sum = thread_ % 32; sum < num_sums; sum += 32) value += part(sum);
            value += from_lane(value, 16);
        }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) value += from_lane(value, offset);
        return value;
    }

    __device__ __forceinline__ uint32_t slot(int set, int index, int warp) const {
        constexpr int kIndexBytes = Storage::kMaxSums * sizeof(float);
        constexpr int kSetBytes = 3 * kIndexBytes;
        return sums_ + set * kSetBytes + index * kIndexBytes +
               warp * static_cast<int>(sizeof(float));
    }
    __device__ __forceinline__ uint32_t barrier_of(int set) const {
        return sums_ + static_cast<int>(offsetof(Storage, barriers)) +
               set * static_cast<int>(sizeof(uint64_t));
    }
    __device__ __forceinline__ float load(int set, int index, int warp) const {
        return ptx::ld_shared_f32(slot(set, index, warp));
    }

    /// A warp's sum to whoever needs it: in a cluster lane `rank` of those that have it sends it to
    /// each CTA, its own included.
    __device__ __forceinline__ void store(int set, int index, float value, int rank) {
        if constexpr (Arch::kHasClusters) {
            if (cluster_size_ > 1) {
                if (rank >= cluster_size_) return;
                const int place = cluster_rank() * (blockDim.x / 32) + thread_ / 32;
                ptx::st_async(ptx::mapa(slot(set, index, place), rank), value,
                              ptx::mapa(barrier_of(set), rank));
                return;
            }
        }
        if (rank == 0) ptx::st_shared_f32(slot(set, index, thread_ / 32), value);
    }

    /// The set of the row that is sent next. Its barrier waits for `count` sums of each warp.
    __device__ __forceinline__ int next_set_to_send(int count) {
        const int set = num_sent_++ % Storage::kSets;
        if constexpr (Arch::kHasClusters) {
            if (cluster_size_ > 1 && threadIdx.x == 0) {
                ptx::mbarrier_arrive_expect_tx(
                    barrier_of(set), sums_of_row() * count * static_cast<int>(sizeof(float)));
            }
        }
        return set;
    }

    /// The set of the row that is received next, once it is there.
    __device__ __forceinline__ int wait_for_set() {
        const int set = num_received_ % Storage::kSets;
        if constexpr (Arch::kHasClusters) {
            if (cluster_size_ > 1) {
                while (
                    !ptx::mbarrier_try_wait(barrier_of(set), num_received_ / Storage::kSets % 2)) {
                }
            }
        }
        ++num_received_;
        return set;
    }

    __device__ bool is_cluster() const { return Arch::kHasClusters && cluster_size_ > 1; }

    int thread_;
    int sums_;  // address of the storage
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
