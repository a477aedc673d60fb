#pragma once

#include <cstdint>

#include "norms/norm_fwd.cuh"
#include "norms/row_stages.cuh"

// The forward pass of both norms for rows that take a cluster of CTAs: as many clusters as fit at a
// time walk over the rows, with the next rows' loads in flight. Launching a cluster a row instead
// would have every row wait for the start of its CTAs and for each other's barriers.

namespace flash_attn_norm {

template <DType kXDType_, bool kLayerNorm_, class Arch_>
struct FwdClusterConfig : FwdConfig<kXDType_, kLayerNorm_, FwdKind::kUsual, 4, Arch_> {
    using Arch = Arch_;
    /// One CTA on each multiprocessor: registers for two rows, weight and bias.
    static constexpr bool kLoadsFactorsEarly = true;
    using FactorTile = uint4[4];
};

struct NormFwdClusterParams {
    NormFwdParams params;
    int num_steps = 0;   // rows; more do not fit in memory
    int num_stages = 1;  // rows in flight
};

/// 16-byte words that a thread has in a stage: x and the residual.
template <class Config>
FAN_HOST_DEVICE int fwd_stage_words(bool has_residual) {
    return Config::kVecs * (has_residual ? 2 : 1);
}

/// What is kept of a row from its first to its second half: the sum, and a thread's part of what
/// is added up over the row.
template <class Config>
struct FwdClusterRow {
    typename Config::SumTile sum;
    RowMoments moments;  // RMSNorm: the squares alone
};

template <class Config>
class FwdStages {
  public:
    __device__ FwdStages(const ThreadSmem& smem, const NormFwdParams& params)
        : stages_(smem, 0, fwd_stage_words<Config>(params.residual != nullptr)) {}

    __device__ __forceinline__ void copy(const NormFwdParams& params, const Row& row,
                                         const RowColumns<Config>& columns, int stage) const {
        const RowShape& shape = params.problem.rows;
        stages_.template copy<Config::kXDType>(params.x, shape, params.x_strides, row, columns,
                                               stage, 0);
        if (params.residual == nullptr) return;
        stages_.template copy<Config::kXDType>(params.residual, shape, params.residual_strides, row,
                                               columns, stage, Config::kVecs);
    }

    /// x, or x + residual, which is stored if it is wanted.
    __device__ __forceinline__ void get_sum(const NormFwdParams& params, const Row& row,
                                            const RowColumns<Config>& columns, int stage,
                                            typename Config::SumTile& sum) const {
        const int64_t start = row.index * params.problem.hidden_size;
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            sum[v] = stages_.template get<Config::kXDType>(stage, 0, v);
            if (params.residual != nullptr) {
                float values[Config::kPack];
                float added[Config::kPack];
                sum[v].get(values);
                stages_.template get<Config::kXDType>(stage, Config::kVecs, v).get(added);
#pragma unroll
                for (int i = 0; i < Config::kPack; ++i) values[i] += added[i];
                sum[v].set(values);
            }
            if (params.residual_out != nullptr && columns.is_inside(v)) {
                sum[v].store(params.residual_out, start + columns.column(v));
            }
        }
    }

  private:
    RowStages<Config> stages_;
};

/// Sends a thread's part of what is added up over a row.
template <class Config>
__device__ __forceinline__ void send_row(const RowColumns<Config>& columns,
                                         FwdClusterRow<Config>& row,
                                         RowReducer<typename Config::Arch>& reducer) {
    if constexpr (Config::kLayerNorm) {
        row.moments = part_moments(columns, row.sum);
        reducer.send(row.moments, columns.is_even);
    } else {
        float squares[1] = {sum_of_squares<Config, false>(row.sum)};
        reducer.send(squares);
        row.moments.squares = squares[0];
    }
}

/// rstd of the row that was sent, and its mean, 0 for RMSNorm.
template <class Config>
__device__ __forceinline__ float receive_row(const NormProblem& problem, const Rounding& rounding,
                                             FwdClusterRow<Config>& row,
                                             RowReducer<typename Config::Arch>& reducer,
                                             float& mean) {
    if constexpr (Config::kLayerNorm) {
        reducer.receive(row.moments, problem.inv_hidden_size);
    } else {
        float squares[1] = {row.moments.squares};
        reducer.receive(squares);
        row.moments.squares = squares[0];
    }
    mean = row.moments.sum * problem.inv_hidden_size;
    return row_rstd<Config::kXDType>(problem, rounding, row.moments.squares);
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, 1)
    norm_fwd_cluster_kernel(const __grid_constant__ NormFwdClusterParams kernel_params) {
    extern __shared__ uint4 dynamic_smem[];
    __shared__ RowSumStorage<typename Config::Arch> row_sum_smem;
    const NormFwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<typename Config::Arch> reducer(row_sum_smem);
    const RowColumns<Config> columns(problem, reducer);
    const int num_stages = kernel_params.num_stages;
    const FwdStages<Config> stages(
        ThreadSmem(dynamic_smem, num_stages * fwd_stage_words<Config>(params.residual != nullptr)),
        params);
    const int num_steps = kernel_params.num_steps;
    reducer.wait_for_cluster();
    wait_for_earlier_kernels<typename Config::Arch>();

    const int first_step = reducer.block();
    const int num_blocks = reducer.num_blocks();
    for (int stage = 0; stage < num_stages; ++stage) {
        const int step = first_step + stage * num_blocks;
        if (step < num_steps) stages.copy(params, Row(problem, step), columns, stage);
        ptx::cp_async_commit_group();
    }
    const OutFormula formula = out_formula<Config>(params, rounding);
    const EarlyFactors<Config> factors(params, formula, columns);
    constexpr bool kHasProduct = !Config::kLayerNorm && Config::kXDType != DType::kFloat32;

    // One row ahead: what a row's sums take between warps and CTAs is hidden by the next row's
    // first half. `row` is the one that is finished.
    FwdClusterRow<Config> row, next_row;
    int stage = 0;
    for (int step = first_step - num_blocks; step < num_steps; step += num_blocks) {
        const int next_step = step + num_blocks;
        if (next_step < num_steps) {
            wait_for_stage(num_stages);
            stages.get_sum(params, Row(problem, next_step), columns, stage, next_row.sum);
            send_row(columns, next_row, reducer);
            const int later_step = next_step + num_stages * num_blocks;
            if (later_step < num_steps) {
                stages.copy(params, Row(problem, later_step), columns, stage);
            }
            ptx::cp_async_commit_group();
            stage = stage + 1 == num_stages ? 0 : stage + 1;
        }
        if (step >= first_step) {
            const Row place(problem, step);
            float mean;
            const float rstd = receive_row(problem, rounding, row, reducer, mean);
            if (kHasProduct && formula == OutFormula::kProduct) {
                store_out<Config, kHasProduct ? OutFormula::kProduct : OutFormula::kSameDtype>(
                    params, rounding, place, columns, factors, row.sum, mean, rstd);
            } else {
                store_out<Config, OutFormula::kSameDtype>(params, rounding, place, columns, factors,
                                                          row.sum, mean, rstd);
            }
            if (threadIdx.x == 0 && reducer.cluster_rank() == 0) {
                params.rstd[place.index] = rstd;
                if (Config::kLayerNorm) params.mean[place.index] = mean;
            }
        }
        row = next_row;
    }
}

}  // namespace flash_attn_norm
