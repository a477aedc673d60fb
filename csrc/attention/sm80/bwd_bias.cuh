#pragma once

#include <cstdint>

#include "attention/bwd_workspace.h"
#include "attention/scores.cuh"
#include "attention/sm80/shared_storage.h"
#include "ptx/reduction.cuh"

namespace flash_attn_norm {
namespace sm80 {

/// Waits until *turn is `value`: the sums that go first are then visible. All threads call it.
__device__ __forceinline__ void wait_for_turn(const int* turn, int value) {
    if (threadIdx.x == 0) {
        while (ptx::ld_acquire(turn) != value) {
        }
    }
    __syncthreads();
}

/// Lets the next one add its sums after those of this CTA. All threads call it.
__device__ __forceinline__ void pass_turn(int* turn) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::red_release_add(turn, 1);
}

/// The gradient of the additive bias for one CTA and head.
struct BiasGradient {
    void* rows = nullptr;      // entry (row 0, key 0) of a bias with rows
    float* columns = nullptr;  // key 0 of a bias without rows: sums over rows, one per head and key
    int* turns = nullptr;      // of (row block 0, this key block); null: no order needed
    int turn_stride = 0;       // key blocks
    int turn = 0;              // contributions that go first
    bool shared = false;       // other CTAs add to the same entries
    bool is_float32 = true;    // else of the kernel's element type
    int64_t row_stride = 0;
    int seqlen_q = 0;
    int num_columns = 0;

    __device__ bool wanted() const { return rows != nullptr || columns != nullptr; }

    __device__ static BiasGradient make(const AttentionBwdParams& params,
                                        const BwdWorkspace& workspace, const SeqlenInfo& info,
                                        int64_t batch, int head, int n_block, int block_m,
                                        int block_n) {
        const AttentionProblem& problem = params.problem;
        const BiasStrides& strides = params.dattn_bias_strides;
        BiasGradient gradient;
        if (params.dattn_bias == nullptr) return gradient;
        gradient.seqlen_q = static_cast<int>(info.seqlen_q);
        gradient.num_columns = static_cast<int>(
            info.seqlen_k < problem.bias_columns ? info.seqlen_k : problem.bias_columns);
        if (strides.row == 0) {
            const int64_t keys =
                problem.is_packed() ? problem.total_k : problem.batch_size * problem.seqlen_k;
            const int64_t first_key =
                problem.is_packed() ? info.row_k : info.batch * problem.seqlen_k;
            gradient.columns = workspace.bias_parts + head * keys + first_key;
            return gradient;
        }
        gradient.is_float32 = params.dattn_bias_dtype == DType::kFloat32;
        const int64_t offset =
            info.batch * strides.batch + head * strides.head + info.row_q * strides.row;
        gradient.rows =
            static_cast<char*>(params.dattn_bias) + offset * (gradient.is_float32 ? 4 : 2);
        gradient.row_stride = strides.row;
        gradient.shared = bias_gradient_is_shared(params);
        if (params.deterministic && gradient.shared && n_block * block_n < gradient.num_columns) {
            const BlockSlots slots = BlockSlots::queries(problem, block_m);
            const int64_t over_batch = !problem.is_packed() && strides.batch == 0;
            const int64_t first_slot = over_batch ? 0 : slots.first_slot(batch);
            const int64_t turn_head = strides.head == 0 ? 0 : head;
            gradient.turn_stride = static_cast<int>((problem.bias_columns + block_n - 1) / block_n);
            gradient.turns = workspace.bias_turn +
                             (turn_head * slots.count() + first_slot) * gradient.turn_stride +
                             n_block;
            const int64_t entry = over_batch ? batch : 0;
            gradient.turn =
                static_cast<int>(strides.head == 0 ? entry * problem.num_heads_q + head : entry);
        }
        return gradient;
    }

    /// Writes or adds a warp's tile of dS, taken before the softcap's slope; (row, key) is this
    /// lane's first entry.
    template <class Element, int kTilesM, int kTilesN>
    __device__ __forceinline__ void put_rows(const float (&ds)[kTilesM][kTilesN][4], int row,
                                             int key) const {
        const bool pairs = row_stride % 2 == 0;  // a pair of columns may be one store
        if (shared) {
            for_each_pair<float>(ds, row, key, [&](float* pair, float low, float high, int count) {
                if (count > 0) ptx::red_add_f32(pair, low);
                if (count > 1) ptx::red_add_f32(pair + 1, high);
            });
        } else if (is_float32) {
            for_each_pair<float>(ds, row, key, [&](float* pair, float low, float high, int count) {
                if (pairs && count > 1) {
                    *reinterpret_cast<float2*>(pair) = make_float2(low, high);
                } else {
                    if (count > 0) pair[0] = low;
                    if (count > 1) pair[1] = high;
                }
            });
        } else {
            for_each_pair<uint16_t>(ds, row, key,
                                    [&](uint16_t* pair, float low, float high, int count) {
                                        const uint32_t bits = Element::pack(low, high);
                                        if (pairs && count > 1) {
                                            *reinterpret_cast<uint32_t*>(pair) = bits;
                                        } else {
                                            if (count > 0) pair[0] = static_cast<uint16_t>(bits);
                                            if (count > 1)
                                                pair[1] = static_cast<uint16_t>(bits >> 16);
                                        }
                                    });
        }
    }

    /// Calls fn(place, low, high, how many of the two exist) for every pair of columns.
    template <typename Storage, int kTilesM, int kTilesN, class Fn>
    __device__ __forceinline__ void for_each_pair(const float (&ds)[kTilesM][kTilesN][4], int row,
                                                  int key, Fn&& fn) const {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = row + 16 * m + 8 * r;
                const int count = i < seqlen_q ? num_columns - key : 0;
                Storage* entries = static_cast<Storage*>(rows) + i * row_stride + key;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    fn(entries + 8 * n, ds[m][n][2 * r], ds[m][n][2 * r + 1], count - 8 * n);
                }
            }
        }
    }

    template <int kWarps, int kColumns>
    static __device__ __forceinline__ void clear_columns(float (&sums)[kWarps][kColumns]) {
        for (int i = static_cast<int>(threadIdx.x); i < kWarps * kColumns; i += blockDim.x) {
            sums[i / kColumns][i % kColumns] = 0.0f;
        }
        __syncthreads();
    }

    /// Writes the sums of the block that starts at `key`: no other CTA has this head and key.
    template <int kWarps, int kColumns>
    __device__ __forceinline__ void store_columns(const float (&sums)[kWarps][kColumns],
                                                  int key) const {
        for (int i = static_cast<int>(threadIdx.x); i < kColumns && key + i < num_columns;
             i += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
            columns[key + i] = sum;
        }
    }

    /// Adds the columns' sums to `sums`, whose entries belong to one lane each. `column` is this
    /// lane's first column in the tile.
    template <int kTilesM, int kTilesN>
    static __device__ __forceinline__ void add_columns(const float (&ds)[kTilesM][kTilesN][4],
                                                       float* sums, int column, int lane) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.0f;
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) sum += ds[m][n][e] + ds[m][n][2 + e];
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) {
                    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
                }
                if (lane < 4) sums[column + 8 * n + e] += sum;
            }
        }
    }
};

}  // namespace sm80
}  // namespace flash_attn_norm
