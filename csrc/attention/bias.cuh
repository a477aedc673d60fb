#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/params.h"
#include "attention/seqlens.h"

namespace flash_attn_norm {

/// float32 as one more element type, for a bias that has it.
struct Float32 {
    using Storage = float;
    static __device__ __forceinline__ float to_float(float value) { return value; }
};

/// The additive bias of one sequence and head. Rows and keys count inside the sequence; the bias is
/// 0 where it has no entry, for a tile of scores may be larger.
struct Bias {
    const void* entries = nullptr;  // (row 0, key 0); null: no bias
    int64_t row_stride = 0;
    int rows = 0;
    int columns = 0;
    bool is_float32 = false;  // else of the kernel's element type

    __device__ static Bias make(const AttentionProblem& problem, const SeqlenInfo& info, int head) {
        Bias bias;
        if (problem.attn_bias == nullptr) return bias;
        const BiasStrides& strides = problem.attn_bias_strides;
        const int64_t offset =
            info.batch * strides.batch + head * strides.head + info.row_q * strides.row;
        bias.is_float32 = problem.attn_bias_dtype == DType::kFloat32;
        bias.entries =
            static_cast<const char*>(problem.attn_bias) + offset * (bias.is_float32 ? 4 : 2);
        bias.row_stride = strides.row;
        bias.rows = static_cast<int>(info.seqlen_q);
        bias.columns = static_cast<int>(
            info.seqlen_k < problem.bias_columns ? info.seqlen_k : problem.bias_columns);
        return bias;
    }

    __device__ bool exists() const { return entries != nullptr; }

    template <typename Storage>
    __device__ __forceinline__ const Storage* entry(int row, int key) const {
        return static_cast<const Storage*>(entries) + row * row_stride + key;
    }

    /// A lane's entries in one row of an mma accumulator tile: columns key, key + 1, key + 8, ...
    template <class Type, int kTilesN>
    __device__ __forceinline__ void read_row(float (&values)[kTilesN][2], int row, int key) const {
        const auto* source = entry<typename Type::Storage>(row, key);
        const int count = row < rows ? columns - key : 0;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                values[n][e] = 8 * n + e < count ? Type::to_float(source[8 * n + e]) : 0.0f;
            }
        }
    }
};

}  // namespace flash_attn_norm
