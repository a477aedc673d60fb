#pragma once

#include <cstdint>

#include "common/vec.cuh"
#include "norms/params.h"

namespace flash_attn_norm {

/// What is rounded to the dtype of the sum in a pass; see CastingMode. A sum in float32 is not.
struct Rounding {
    bool xhat = false;   // the normalized value
    bool stats = false;  // square, mean square, variance and rstd

    __device__ explicit Rounding(const NormProblem& problem) {
        if (problem.sum_dtype != problem.x_dtype) return;
        xhat = problem.casting_mode != CastingMode::kGemma;
        stats = problem.casting_mode == CastingMode::kNone;
    }
};

/// Turns weights as loaded into factors: adds the offset. An offset of 0 would turn -0 into +0.
template <int kCount>
__device__ __forceinline__ void add_weight_offset(const NormProblem& problem, float* weight) {
    if (problem.weight_offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) weight[i] += problem.weight_offset;
    if (problem.casting_mode == CastingMode::kGemma) return;
    if (problem.weight_dtype == DType::kBFloat16) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) weight[i] = round_to<DType::kBFloat16>(weight[i]);
    } else if (problem.weight_dtype == DType::kFloat16) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) weight[i] = round_to<DType::kFloat16>(weight[i]);
    }
}

/// The factors of kCount columns; ones without a weight.
template <int kCount>
__device__ __forceinline__ void load_weight(const NormProblem& problem, int64_t column,
                                            float* weight) {
    if (problem.weight == nullptr) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) weight[i] = 1.0f;
        return;
    }
    load_as_floats<kCount>(problem.weight, problem.weight_dtype, column, weight);
    add_weight_offset<kCount>(problem, weight);
}

/// Adds the bias of kCount columns, if there is one. Not adding 0 keeps a value of -0.
template <int kCount>
__device__ __forceinline__ void add_bias(const NormFwdParams& params, int64_t column,
                                         float* values) {
    if (params.bias == nullptr) return;
    float bias[kCount];
    load_as_floats<kCount>(params.bias, params.bias_dtype, column, bias);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += bias[i];
}

/// rstd from the sum of squares. The multiplication by a reciprocal, rsqrtf and each rounding are
/// those of torch's own mean and rsqrt on a GPU.
template <DType kXDType>
__device__ __forceinline__ float row_rstd(const NormProblem& problem, const Rounding& rounding,
                                          float sum_of_squares) {
    float mean_square = __fmul_rn(sum_of_squares, problem.inv_hidden_size);
    if (rounding.stats) mean_square = round_to<kXDType>(mean_square);
    float variance = __fadd_rn(mean_square, problem.eps);
    if (rounding.stats) variance = round_to<kXDType>(variance);
    const float rstd = rsqrtf(variance);
    return rounding.stats ? round_to<kXDType>(rstd) : rstd;
}

}  // namespace flash_attn_norm
