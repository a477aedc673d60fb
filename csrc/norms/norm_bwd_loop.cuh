#pragma once

#include <cstdint>

#include "norms/norm_bwd_params.h"
#include "norms/norm_math.cuh"
#include "norms/row_sums.cuh"

// The backward pass of both norms for any size and alignment, and for few rows: one kernel, some of
// whose CTAs compute dx, reading each row twice, and others the sums for dweight and dbias. And the
// last stage of those sums, which the other backward kernel shares.

namespace flash_attn_norm {

constexpr int kLoopThreads = 512;
constexpr int kTileColumns = 32;

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

/// dx of one row per row slot.
template <DType kXDType, int kWidth, class Arch>
__device__ __forceinline__ void loop_dx(const NormBwdParams& params, RowReducer<Arch>& reducer,
                                        int64_t row) {
    const NormProblem& problem = params.problem;
    const bool is_row = row < problem.rows.num_rows;
    const int64_t dout_offset = row_offset(problem.rows, params.dout_strides, row);
    const int64_t sum_offset = row_offset(problem.rows, params.sum_strides, row);
    const int64_t dresidual_out_offset =
        row_offset(problem.rows, params.dresidual_out_strides, row);
    const int64_t first = int64_t{threadIdx.x} * kWidth;
    const int64_t end = is_row ? problem.hidden_size : 0;
    const int64_t step = int64_t{blockDim.x} * kWidth;

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

/// A thread's part of the sums for dweight and dbias of a column: every num_groups-th row from
/// first_row on, kAtOnce rows requested before the first is used.
template <DType kXDType, DType kSumDType, int kAtOnce>
__device__ __forceinline__ void sum_column_rows(const NormBwdParams& params, int64_t first_row,
                                                int64_t end_row, int num_groups, int64_t column,
                                                float (&sums)[2]) {
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    for (int64_t first = first_row; first < end_row; first += kAtOnce * num_groups) {
        // Past the end lies the first row again, which exists and is not counted: a branch around
        // a load would have it wait for the one before.
        bool is_row[kAtOnce];
        int64_t rows[kAtOnce], dout_offsets[kAtOnce], sum_offsets[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            is_row[i] = first + i * num_groups < end_row;
            rows[i] = is_row[i] ? first + i * num_groups : first;
            dout_offsets[i] = row_offset(problem.rows, params.dout_strides, rows[i]) + column;
            sum_offsets[i] = row_offset(problem.rows, params.sum_strides, rows[i]) + column;
        }
        float dout[kAtOnce][1], sum[kAtOnce][1], mean[kAtOnce], rstd[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            load_as_floats<1>(params.dout, kXDType, dout_offsets[i], dout[i]);
            load_as_floats<1>(params.sum, kSumDType, sum_offsets[i], sum[i]);
            rstd[i] = params.rstd[rows[i]];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) mean[i] = 0.0f;
        if (problem.is_layer_norm) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) mean[i] = params.mean[rows[i]];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (!is_row[i]) break;
            float xhat = (sum[i][0] - mean[i]) * rstd[i];
            if (rounding.xhat) xhat = round_to<kXDType>(xhat);
            sums[0] = fmaf(dout[i][0], xhat, sums[0]);
            sums[1] += dout[i][0];
        }
    }
}

template <DType kXDType, DType kSumDType>
__device__ __forceinline__ void sum_column(const NormBwdParams& params, int64_t first_row,
                                           int64_t end_row, int num_groups, int64_t column,
                                           float (&sums)[2]) {
    if (end_row - first_row <= num_groups) {
        sum_column_rows<kXDType, kSumDType, 1>(params, first_row, end_row, num_groups, column,
                                               sums);
    } else {
        sum_column_rows<kXDType, kSumDType, 4>(params, first_row, end_row, num_groups, column,
                                               sums);
    }
}

/// The sums for dweight and dbias of a tile of columns over a run of rows: one of the partial sums,
/// or the gradients where there is one run only.
template <DType kXDType>
__device__ __forceinline__ void loop_columns(const NormBwdKernelParams& kernel_params,
                                             int64_t block) {
    constexpr int kMaxGroups = kLoopThreads / kTileColumns;
    __shared__ float smem[2][kMaxGroups][kTileColumns];
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int lane = thread % kTileColumns;
    const int group = thread / kTileColumns;
    const int num_groups = blockDim.x * blockDim.y / kTileColumns;
    const int64_t num_tiles = (problem.hidden_size + kTileColumns - 1) / kTileColumns;
    const int64_t partial = block / num_tiles;
    const int64_t column = (block % num_tiles) * kTileColumns + lane;
    const int64_t first_row = partial * kernel_params.rows_per_partial;
    const int64_t last_row = first_row + kernel_params.rows_per_partial;
    const int64_t end_row = last_row < problem.rows.num_rows ? last_row : problem.rows.num_rows;
    const bool is_column = column < problem.hidden_size;

    float sums[2] = {0.0f, 0.0f};
    const int64_t read_column = is_column ? column : 0;
    if (problem.sum_dtype == kXDType) {
        sum_column<kXDType, kXDType>(params, first_row + group, end_row, num_groups, read_column,
                                     sums);
    } else {
        sum_column<kXDType, DType::kFloat32>(params, first_row + group, end_row, num_groups,
                                             read_column, sums);
    }
    smem[0][group][lane] = sums[0];
    smem[1][group][lane] = sums[1];
    __syncthreads();
    if (group > 1 || !is_column) return;
    void* target = group == 0 ? params.dweight : params.dbias;
    if (target == nullptr) return;
    float total = 0.0f;
    for (int i = 0; i < num_groups; ++i) total += smem[group][i][lane];
    if (kernel_params.num_partials == 1) {
        store_rounded(target, group == 0 ? problem.weight_dtype : params.dbias_dtype, column,
                      total);
    } else {
        float* partials = group == 0 ? kernel_params.dweight_partial : kernel_params.dbias_partial;
        partials[partial * problem.hidden_size + column] = total;
    }
}

/// The first num_dx_ctas CTAs compute dx, the others the sums. At least two warps a CTA.
template <DType kXDType, int kWidth, class Arch>
__global__ void __launch_bounds__(kLoopThreads, 2)
    norm_bwd_loop_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ RowSumStorage<Arch> smem;
    RowReducer<Arch> reducer(smem);
    wait_for_earlier_kernels<Arch>();
    if (blockIdx.x < kernel_params.num_dx_ctas) {
        loop_dx<kXDType, kWidth>(kernel_params.params, reducer,
                                 int64_t{blockIdx.x} * blockDim.y + threadIdx.y);
    } else {
        loop_columns<kXDType>(kernel_params, blockIdx.x - kernel_params.num_dx_ctas);
    }
}

constexpr int kFinalThreads = 1024;

/// Last stage of dweight and dbias: blockDim.x columns of the partial sums a CTA, in fixed order,
/// rounded once. Zero without any. The first half of the CTAs does dweight, the second dbias; or
/// all do the one there is. blockDim.y is a power of two.
template <class Arch>
__global__ void __launch_bounds__(kFinalThreads)
    norm_bwd_final_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ float smem[kFinalThreads];
    const NormBwdParams& params = kernel_params.params;
    const int64_t hidden_size = params.problem.hidden_size;
    const int64_t num_tiles = (hidden_size + blockDim.x - 1) / blockDim.x;
    const bool is_bias = params.dweight == nullptr || blockIdx.x >= num_tiles;
    const int64_t column = (blockIdx.x % num_tiles) * blockDim.x + threadIdx.x;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const float* partial = is_bias ? kernel_params.dbias_partial : kernel_params.dweight_partial;
    wait_for_earlier_kernels<Arch>();

    float sum = 0.0f;
    if (column < hidden_size) {
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < kernel_params.num_partials; i += blockDim.y) {
            sum += partial[i * hidden_size + column];
        }
    }
    smem[thread] = sum;
    for (int groups = blockDim.y / 2; groups > 0; groups /= 2) {
        __syncthreads();
        if (threadIdx.y < groups) {
            sum += smem[thread + groups * blockDim.x];
            smem[thread] = sum;
        }
    }
    if (threadIdx.y != 0 || column >= hidden_size) return;
    store_rounded(is_bias ? params.dbias : params.dweight,
                  is_bias ? params.dbias_dtype : params.problem.weight_dtype, column, sum);
}

}  // namespace flash_attn_norm
