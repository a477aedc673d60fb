#pragma once

#include <cstdint>

#include "norms/norm_bwd_params.h"
#include "norms/norm_math.cuh"
#include "norms/row_sums.cuh"

// The backward pass of both norms for any size and alignment: one kernel for dx, which reads each
// row twice, one for the sums of dweight and dbias; and the last stage of those sums, which the
// other backward kernels share.

namespace flash_attn_norm {

constexpr int kLoopThreads = 512;

/// dout, xhat and dxhat = dout * weight of kWidth columns of one row.
template <DType kXDType, int kWidth>
struct LoopColumns {
    float dout[kWidth];
    float xhat[kWidth];
    float dxhat[kWidth];

    __device__ LoopColumns(const NormBwdParams& params, int64_t dout_offset, int64_t sum_offset,
                           int64_t column, float mean, float rstd) {
        const NormProblem& problem = params.problem;
        load_as_floats<kWidth>(params.dout, kXDType, dout_offset + column, dout);
        load_as_floats<kWidth>(params.sum, problem.sum_dtype, sum_offset + column, xhat);
        load_weight<kWidth>(problem, column, dxhat);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            xhat[i] = (xhat[i] - mean) * rstd;
            dxhat[i] *= dout[i];
        }
    }
};

template <DType kXDType, int kWidth, class Arch>
__global__ void __launch_bounds__(kLoopThreads)
    norm_bwd_loop_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ RowSumStorage smem;
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    RowReducer<Arch> reducer(smem);
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const bool is_row = row < problem.rows.num_rows;
    const int64_t dout_offset = row_offset(problem.rows, params.dout_strides, row);
    const int64_t sum_offset = row_offset(problem.rows, params.sum_strides, row);
    const int64_t dresidual_out_offset =
        row_offset(problem.rows, params.dresidual_out_strides, row);
    const int64_t first = int64_t{threadIdx.x} * kWidth;
    const int64_t end = is_row ? problem.hidden_size : 0;
    const int64_t step = int64_t{blockDim.x} * kWidth;
    wait_for_earlier_kernels<Arch>();

    const float rstd = is_row ? params.rstd[row] : 0.0f;
    const float mean = is_row && problem.is_layer_norm ? params.mean[row] : 0.0f;
    float means[2] = {0.0f, 0.0f};
    for (int64_t column = first; column < end; column += step) {
        const LoopColumns<kXDType, kWidth> columns(params, dout_offset, sum_offset, column, mean,
                                                   rstd);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            means[0] = fmaf(columns.dxhat[i], columns.xhat[i], means[0]);
            means[1] += columns.dxhat[i];
        }
    }
    reducer.sum(means);
    means[0] *= problem.inv_hidden_size;
    means[1] *= problem.is_layer_norm ? problem.inv_hidden_size : 0.0f;

    for (int64_t column = first; column < end; column += step) {
        const LoopColumns<kXDType, kWidth> columns(params, dout_offset, sum_offset, column, mean,
                                                   rstd);
        float dx[kWidth];
        if (params.dresidual_out != nullptr) {
            load_as_floats<kWidth>(params.dresidual_out, problem.sum_dtype,
                                   dresidual_out_offset + column, dx);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float norm_part =
                rstd * (fmaf(-columns.xhat[i], means[0], columns.dxhat[i]) - means[1]);
            dx[i] = params.dresidual_out != nullptr ? norm_part + dx[i] : norm_part;
        }
        const int64_t index = row * problem.hidden_size + column;
        store_floats<kXDType, kWidth>(params.dx, index, dx);
        if (params.dresidual != nullptr) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) params.dresidual[index + i] = dx[i];
        }
    }
}

constexpr int kTileColumns = 32;

/// Sums of a tile of columns over the row groups of a CTA, in fixed order; in every thread of
/// group 0. All threads call it.
template <int kGroups>
__device__ __forceinline__ float sum_groups(float value, float (&smem)[kGroups][kTileColumns]) {
    __syncthreads();
    smem[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.y == 0) {
#pragma unroll 8
        for (int group = 0; group < kGroups; ++group) total += smem[group][threadIdx.x];
    }
    return total;
}

constexpr int kColumnGroups = 8;

/// First stage of dweight and dbias: each CTA sums a tile of columns over a run of rows.
template <DType kXDType, class Arch>
__global__ void __launch_bounds__(kTileColumns* kColumnGroups)
    norm_bwd_columns_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ float smem[kColumnGroups][kTileColumns];
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    const int64_t num_tiles = (problem.hidden_size + kTileColumns - 1) / kTileColumns;
    const int64_t partial = blockIdx.x / num_tiles;
    const int64_t column = (blockIdx.x % num_tiles) * kTileColumns + threadIdx.x;
    const int64_t first_row = partial * kernel_params.rows_per_partial;
    const int64_t last_row = first_row + kernel_params.rows_per_partial;
    const int64_t end_row = last_row < problem.rows.num_rows ? last_row : problem.rows.num_rows;
    const bool is_column = column < problem.hidden_size;
    wait_for_earlier_kernels<Arch>();

    float dweight = 0.0f;
    float dbias = 0.0f;
    for (int64_t row = first_row + threadIdx.y; is_column && row < end_row; row += kColumnGroups) {
        float dout[1];
        float xhat[1];
        load_as_floats<1>(params.dout, kXDType,
                          row_offset(problem.rows, params.dout_strides, row) + column, dout);
        load_as_floats<1>(params.sum, problem.sum_dtype,
                          row_offset(problem.rows, params.sum_strides, row) + column, xhat);
        const float mean = problem.is_layer_norm ? params.mean[row] : 0.0f;
        xhat[0] = (xhat[0] - mean) * params.rstd[row];
        if (rounding.xhat) xhat[0] = round_to<kXDType>(xhat[0]);
        dweight = fmaf(dout[0], xhat[0], dweight);
        dbias += dout[0];
    }
    const bool stores = threadIdx.y == 0 && is_column;
    const int64_t index = partial * problem.hidden_size + column;
    dweight = sum_groups<kColumnGroups>(dweight, smem);
    if (stores && params.dweight != nullptr) kernel_params.dweight_partial[index] = dweight;
    dbias = sum_groups<kColumnGroups>(dbias, smem);
    if (stores && params.dbias != nullptr) kernel_params.dbias_partial[index] = dbias;
}

constexpr int kFinalGroups = 32;

/// Last stage of dweight and dbias: the partial sums in fixed order, rounded once. Zero without
/// any. The first half of the CTAs does dweight, the second dbias; or all do the one there is.
template <class Arch>
__global__ void __launch_bounds__(kTileColumns* kFinalGroups)
    norm_bwd_final_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ float smem[kFinalGroups][kTileColumns];
    const NormBwdParams& params = kernel_params.params;
    const int64_t hidden_size = params.problem.hidden_size;
    const int64_t num_tiles = (hidden_size + kTileColumns - 1) / kTileColumns;
    const bool is_bias = params.dweight == nullptr || blockIdx.x >= num_tiles;
    const int64_t column = (blockIdx.x % num_tiles) * kTileColumns + threadIdx.x;
    const float* partial = is_bias ? kernel_params.dbias_partial : kernel_params.dweight_partial;
    wait_for_earlier_kernels<Arch>();

    float sum = 0.0f;
    if (column < hidden_size) {
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < kernel_params.num_partials; i += kFinalGroups) {
            sum += partial[i * hidden_size + column];
        }
    }
    sum = sum_groups<kFinalGroups>(sum, smem);
    if (threadIdx.y != 0 || column >= hidden_size) return;
    store_rounded(is_bias ? params.dbias : params.dweight,
                  is_bias ? params.dbias_dtype : params.problem.weight_dtype, column, sum);
}

}  // namespace flash_attn_norm
