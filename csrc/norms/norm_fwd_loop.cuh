#pragma once

#include <cstdint>

#include "norms/norm_math.cuh"
#include "norms/row_sums.cuh"

// The forward pass of both norms for any size and alignment.

namespace flash_attn_norm {

/// x or x + residual, kWidth columns of one row.
template <DType kXDType, int kWidth>
__device__ __forceinline__ void load_sum_at(const NormFwdParams& params, int64_t x_offset,
                                            int64_t residual_offset, int64_t column, float* sum) {
    load_as_floats<kWidth>(params.x, kXDType, x_offset + column, sum);
    if (params.residual == nullptr) return;
    float residual[kWidth];
    load_as_floats<kWidth>(params.residual, params.residual_dtype, residual_offset + column,
                           residual);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
        sum[i] = round_to(sum[i] + residual[i], params.problem.sum_dtype);
    }
}

/// One row per row slot; reads the row again for each step, from the caches as far as they hold it.
template <DType kXDType, int kWidth, class Arch>
__global__ void __launch_bounds__(512)
    norm_fwd_loop_kernel(const __grid_constant__ NormFwdParams params) {
    __shared__ RowSumStorage<Arch> smem;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<Arch> reducer(smem);
    const int64_t hidden_size = problem.hidden_size;
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool is_row = row < problem.rows.num_rows;
    const int64_t x_offset = row_offset(problem.rows, params.x_strides, row);
    const int64_t residual_offset = row_offset(problem.rows, params.residual_strides, row);
    const int64_t first = int64_t{threadIdx.x} * kWidth;
    const int64_t end = is_row ? hidden_size : 0;
    const int64_t step = int64_t{blockDim.x} * kWidth;
    wait_for_earlier_kernels<Arch>();

    float mean = 0.0f;
    float total[1] = {0.0f};
    float sum[kWidth];
    if (problem.is_layer_norm) {
        for (int64_t column = first; column < end; column += step) {
            load_sum_at<kXDType, kWidth>(params, x_offset, residual_offset, column, sum);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) total[0] += sum[i];
        }
        reducer.sum(total);
        mean = total[0] * problem.inv_hidden_size;
    }
    float squares[1] = {0.0f};
    for (int64_t column = first; column < end; column += step) {
        load_sum_at<kXDType, kWidth>(params, x_offset, residual_offset, column, sum);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float deviation = sum[i] - mean;
            const float square = __fmul_rn(deviation, deviation);
            squares[0] += rounding.stats ? round_to<kXDType>(square) : square;
        }
    }
    reducer.sum(squares);
    const float rstd = row_rstd<kXDType>(problem, rounding, squares[0]);

    for (int64_t column = first; column < end; column += step) {
        float weight[kWidth];
        load_sum_at<kXDType, kWidth>(params, x_offset, residual_offset, column, sum);
        load_weight<kWidth>(problem, column, weight);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            if (params.residual_out != nullptr) {
                store_rounded(params.residual_out, problem.sum_dtype,
                              row * hidden_size + column + i, sum[i]);
            }
            float xhat = __fmul_rn(sum[i] - mean, rstd);
            if (rounding.xhat) xhat = round_to<kXDType>(xhat);
            sum[i] = xhat * weight[i];
        }
        add_bias<kWidth>(params, column, sum);
        store_floats<kXDType, kWidth>(params.out, row * hidden_size + column, sum);
    }
    if (is_row && threadIdx.x == 0) {
        params.rstd[row] = rstd;
        if (params.mean != nullptr) params.mean[row] = mean;
    }
}

}  // namespace flash_attn_norm
