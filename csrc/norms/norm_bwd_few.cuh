#pragma once

#include <cstdint>

#include "norms/norm_bwd_params.h"
#include "norms/norm_bwd_row.cuh"
#include "norms/norm_math.cuh"
#include "norms/row_columns.cuh"
#include "norms/row_sums.cuh"
#include "ptx/opaque.cuh"

// The backward pass of both norms for few rows, in one launch: some CTAs compute dx, the others the
// sums of some columns for dweight and dbias over all rows. Time goes into waiting for memory, so
// every thread requests all that it needs at once, as it lies in memory.

namespace flash_attn_norm {

/// 16 columns a thread, as where there are more rows. Both norms: what LayerNorm has more is 0 in
/// RMSNorm, or -0, which is added to no effect.
template <DType kXDType_, DType kSumDType_, class Arch_>
struct FewRowsConfig {
    static constexpr DType kXDType = kXDType_;
    static constexpr DType kSumDType = kSumDType_;
    static constexpr int kPack = pack_size(kXDType);
    static constexpr int kVecs = 16 / kPack;
    static constexpr int kMaxThreads = 512;
    static constexpr bool kIsEven = false;  // see RowColumns
    static constexpr int kMinCtas = kSumDType == DType::kFloat32 ? 1 : 2;
    static constexpr bool kLayerNorm = true;
    static constexpr int kSums = 2;
    using Arch = WithoutClusters<Arch_>;
    using XPack = PackWords<kPack, kXDType>;
    using SumPack = PackWords<kPack, kSumDType>;
    /// Rows that a thread requests at once for the sums of its columns.
    static constexpr int kRowsAtOnce = SumPack::kWords > XPack::kWords ? 1 : 2;
};

/// dweight and dbias of a pack of columns where there is but one row, in the dtype of x.
template <class Config>
__device__ __forceinline__ void store_products(const NormBwdParams& params, int column,
                                               const typename Config::XPack& dout,
                                               const float* xhat) {
    if (params.dbias != nullptr) dout.store(params.dbias, column);
    if (params.dweight == nullptr) return;
    float products[Config::kPack];
    float factors[Config::kPack];
    typename Config::XPack pack;
    pack.set(xhat);
    pack.get(factors);
    dout.get(products);
    const bool rounds = Rounding(params.problem).xhat;
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) products[i] *= rounds ? factors[i] : xhat[i];
    pack.set(products);
    pack.store(params.dweight, column);
}

/// dx of one row per row slot.
template <class Config>
__device__ __forceinline__ void few_rows_dx(const NormBwdKernelParams& kernel_params,
                                            RowReducer<typename Config::Arch>& reducer) {
    constexpr int kVecs = Config::kVecs;
    constexpr int kPack = Config::kPack;
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const RowColumns<Config> columns(problem, kernel_params.num_row_parts);
    const Row row(problem, blockIdx.x);
    const char* dout_row =
        row_start(params.dout, Config::kXDType, problem.rows, params.dout_strides, row.index);
    const char* sum_row =
        row_start(params.sum, Config::kSumDType, problem.rows, params.sum_strides, row.index);
    const bool has_weight_of_x = problem.weight != nullptr && problem.weight_offset == 0.0f &&
                                 problem.weight_dtype == Config::kXDType;
    const bool has_residual = params.dresidual_out != nullptr;
    const int64_t stats_row = row.is_inside ? row.index : 0;
    wait_for_earlier_kernels<typename Config::Arch>();

    typename Config::XPack dout[kVecs], weight_words[kVecs];
    typename Config::SumPack sum[kVecs], dresidual_out[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        const bool is_inside = row.is_inside && columns.is_inside(v);
        dout[v].load(dout_row, columns.column(v), is_inside);
        sum[v].load(sum_row, columns.column(v), is_inside);
    }
    BwdStats<Config> stats;
    stats.rstd = __ldg(params.rstd + stats_row);
    if (problem.is_layer_norm) stats.mean = __ldg(params.mean + stats_row);
    if (has_weight_of_x) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            weight_words[v].load(problem.weight, columns.column(v), columns.is_inside(v));
        }
    }
    // Twice, before and after the sums: there are not registers enough for what comes out.
    const auto normalize = [&](int v, float* xhat, float* dxhat) {
        float values[kPack];
        if (has_weight_of_x) {
            weight_words[v].get(dxhat);
        } else {
            load_weight<kPack>(problem, columns.column_inside(v), dxhat);
        }
        dout[v].get(values);
        sum[v].get(xhat);
        stats.normalize(xhat);
#pragma unroll
        for (int i = 0; i < kPack; ++i) dxhat[i] = __fmul_rn(values[i], dxhat[i]);
    };
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        float xhat[kPack], dxhat[kPack];
        normalize(v, xhat, dxhat);
        add_pack_sums<Config>(dxhat, xhat, sums);
    }
    // Requested here: before, there are not registers enough.
    if (has_residual) {
        const int64_t start = row_offset(problem.rows, params.dresidual_out_strides, row.index);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
            dresidual_out[v].load(params.dresidual_out, start + columns.column(v),
                                  row.is_inside && columns.is_inside(v));
        }
    }
    reducer.sum(sums);
    if (!problem.is_layer_norm) sums[1] = 0.0f;
    const BwdFormula<Config> formula(problem, stats.rstd, sums);

    const int64_t start = row.index * problem.hidden_size;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
        if (!row.is_inside || !columns.is_inside(v)) continue;
        float xhat[kPack], dx[kPack];
        normalize(v, xhat, dx);
        if (kernel_params.is_only_row)
            store_products<Config>(params, columns.column(v), dout[v], xhat);
#pragma unroll
        for (int i = 0; i < kPack; ++i) dx[i] = formula.dx(dx[i], xhat[i]);
        if (has_residual) {
            float added[kPack];
            dresidual_out[v].get(added);
#pragma unroll
            for (int i = 0; i < kPack; ++i) dx[i] += added[i];
        }
        store_floats<Config::kXDType, kPack>(params.dx, start + columns.column(v), dx);
        if (params.dresidual != nullptr) {
            store_floats<DType::kFloat32, kPack>(params.dresidual, start + columns.column(v), dx);
        }
    }
}

/// A thread's part of the sums for dweight and dbias of a pack of columns: every num_groups-th row.
template <class Config>
__device__ __forceinline__ void few_rows_column_part(const NormBwdParams& params, int group,
                                                     int num_groups, int column,
                                                     float (&sums)[2][Config::kPack]) {
    constexpr int kAtOnce = Config::kRowsAtOnce;
    constexpr int kPack = Config::kPack;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    const int num_rows = static_cast<int>(problem.rows.num_rows);
    for (int first = group; first < num_rows; first += kAtOnce * num_groups) {
        typename Config::XPack dout[kAtOnce];
        typename Config::SumPack sum[kAtOnce];
        float rstd[kAtOnce], mean[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            // Past the end zeros are added.
            const int row = first + i * num_groups;
            const bool is_row = row < num_rows;
            dout[i].load(params.dout, row_offset(problem.rows, params.dout_strides, row) + column,
                         is_row);
            sum[i].load(params.sum, row_offset(problem.rows, params.sum_strides, row) + column,
                        is_row);
            rstd[i] = __ldg(params.rstd + (is_row ? row : 0));
            mean[i] = 0.0f;
            if (problem.is_layer_norm) mean[i] = __ldg(params.mean + (is_row ? row : 0));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float values[kPack];
            float xhat[kPack];
            dout[i].get(values);
            sum[i].get(xhat);
#pragma unroll
            for (int j = 0; j < kPack; ++j) xhat[j] = (xhat[j] - mean[i]) * rstd[i];
            if (rounding.xhat) {
                typename Config::XPack rounded;
                rounded.set(xhat);
                rounded.get(xhat);
            }
#pragma unroll
            for (int j = 0; j < kPack; ++j) {
                sums[0][j] = fmaf(values[j], xhat[j], sums[0][j]);
                sums[1][j] += values[j];
            }
        }
    }
}

/// The sums of each group of rows, for as many columns as a CTA has. Rows of 4 words more than
/// that, so that the threads which add them up read from different banks.
template <class Config>
struct ColumnSumStorage {
    static constexpr int kMaxGroups = 64;
    float sums[2][Config::kMaxThreads * Config::kPack + 4 * kMaxGroups];
};

/// dweight and dbias of column_lanes packs of columns.
template <class Config>
__device__ __forceinline__ void few_rows_columns(const NormBwdKernelParams& kernel_params,
                                                 ColumnSumStorage<Config>& smem, int block) {
    constexpr int kPack = Config::kPack;
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const int lanes = kernel_params.column_lanes;
    const int num_threads = blockDim.x * blockDim.y;
    const int num_groups = num_threads / lanes;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int num_columns = lanes * kPack;
    const int first_column = block * num_columns;
    const int hidden_size = static_cast<int>(problem.hidden_size);
    int group = thread / lanes;
    ptx::make_opaque(group);  // divided before the wait
    const int lane = thread - group * lanes;
    const int row_words = num_columns + 4;
    wait_for_earlier_kernels<typename Config::Arch>();

    float sums[2][kPack] = {};
    const int column = first_column + lane * kPack;
    if (column < hidden_size) {
        few_rows_column_part<Config>(params, group, num_groups, column, sums);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < kPack; i += 4) {
            *reinterpret_cast<float4*>(&smem.sums[k][group * row_words + lane * kPack + i]) =
                make_float4(sums[k][i], sums[k][i + 1], sums[k][i + 2], sums[k][i + 3]);
        }
    }
    __syncthreads();

    // Neighbouring threads share a column, each a run of every parts-th group, if there are more
    // threads than columns.
    const int parts = num_threads > num_columns ? num_threads / num_columns : 1;
    const int part = thread % parts;
    for (int first = 0; first < num_columns; first += num_threads / parts) {
        const int own = first + thread / parts;
        if (own >= num_columns) continue;  // only where parts is 1
        float totals[2] = {0.0f, 0.0f};
        for (int i = part; i < num_groups; i += parts) {
            totals[0] += smem.sums[0][i * row_words + own];
            totals[1] += smem.sums[1][i * row_words + own];
        }
        for (int offset = parts / 2; offset > 0; offset /= 2) {
            totals[0] += __shfl_xor_sync(0xffffffffu, totals[0], offset);
            totals[1] += __shfl_xor_sync(0xffffffffu, totals[1], offset);
        }
        const int index = first_column + own;
        if (part != 0 || index >= hidden_size) continue;
        if (params.dweight != nullptr) {
            store_rounded(params.dweight, problem.weight_dtype, index, totals[0]);
        }
        if (params.dbias != nullptr) {
            store_rounded(params.dbias, params.dbias_dtype, index, totals[1]);
        }
    }
}

/// The first num_dx_ctas CTAs compute dx, the others the sums of columns.
template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, Config::kMinCtas)
    norm_bwd_few_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    __shared__ union {
        RowSumStorage<typename Config::Arch> rows;
        ColumnSumStorage<Config> columns;
    } smem;
    const int num_dx_ctas = static_cast<int>(kernel_params.num_dx_ctas);
    if (static_cast<int>(blockIdx.x) < num_dx_ctas) {
        RowReducer<typename Config::Arch> reducer(smem.rows);
        few_rows_dx<Config>(kernel_params, reducer);
    } else {
        few_rows_columns<Config>(kernel_params, smem.columns, blockIdx.x - num_dx_ctas);
    }
}

}  // namespace flash_attn_norm
