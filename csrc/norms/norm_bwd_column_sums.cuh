#pragma once

#include "common/vec.cuh"
#include "norms/row_columns.cuh"

// What the persistent backward kernel sums up over the rows for dweight and dbias.

namespace flash_attn_norm {

/// What a thread has summed up of its columns.
template <class Config>
struct BwdSums {
    typename Config::Columns dweight = {};
    typename Config::Columns dbias = {};
};

/// Adds up what the row slots of a CTA have of each column, half of the slots to the other half and
/// so on, and stores the sums: in float32 in the CTA's row of the partial sums, or rounded if there
/// is no other CTA.
template <class Config>
__device__ __forceinline__ void store_column_sums(typename Config::Columns& sums, float4* smem,
                                                  const RowColumns<Config>& columns, void* target,
                                                  DType dtype) {
    constexpr int kWords = Config::kPack / 4;
    const int slot = threadIdx.y;
    const auto word = [&](int of_slot, int v, int i) -> float4& {
        return smem[((of_slot * Config::kVecs + v) * kWords + i) * blockDim.x + threadIdx.x];
    };
    for (int count = blockDim.y; count > 1; count = (count + 1) / 2) {
        const int half = (count + 1) / 2;
        __syncthreads();  // the others may still read what lies there
        if (slot >= half && slot < count) {
#pragma unroll
            for (int v = 0; v < Config::kVecs; ++v) {
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    const float* from = sums[v] + 4 * i;
                    word(slot, v, i) = make_float4(from[0], from[1], from[2], from[3]);
                }
            }
        }
        __syncthreads();
        if (slot + half >= count) continue;
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const float4 other = word(slot + half, v, i);
                sums[v][4 * i] += other.x;
                sums[v][4 * i + 1] += other.y;
                sums[v][4 * i + 2] += other.z;
                sums[v][4 * i + 3] += other.w;
            }
        }
    }
    if (slot != 0) return;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (!columns.is_inside(v)) continue;
        if (dtype == DType::kFloat32) {
            store_floats<DType::kFloat32, Config::kPack>(target, columns.column(v), sums[v]);
        } else {
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                store_rounded(target, dtype, columns.column(v) + i, sums[v][i]);
            }
        }
    }
}

}  // namespace flash_attn_norm
