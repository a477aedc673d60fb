#pragma once

#include <cstdint>

#include "norms/norm_fwd.cuh"
#include "norms/row_stages.cuh"

// The forward pass of both norms for rows that take a cluster of CTAs: as many clusters as fit at a
// time walk over the rows, with the next rows' loads in flight. Launching a cluster a row instead
// would have every row wait for the start of its CTAs and for each other's barriers.

namespace flash_attn_norm {

/// kVecs packs a thread: 8, or 4 with a residual, for which there must be memory, too.
template <DType kXDType_, bool kLayerNorm_, int kVecs_, class Arch_>
struct FwdClusterConfig : FwdConfig<kXDType_, kLayerNorm_, FwdKind::kUsual, kVecs_, Arch_> {
    using Arch = Arch_;
    /// One CTA on each multiprocessor: registers for weight and bias. Rows stay in shared memory.
    static constexpr bool kLoadsFactorsEarly = true;
    static constexpr bool kHasResidual = kVecs_ == 4;
    using FactorTile = uint4[kVecs_];
};

struct NormFwdClusterParams {
    NormFwdParams params;
    int num_steps = 0;   // rows; more do not fit in memory
    int num_stages = 1;  // rows in flight
};

/// 16-byte words that a thread has in a stage: x and the residual.
template <class Config>
constexpr int kFwdStageWords = Config::kVecs * (Config::kHasResidual ? 2 : 1);

template <class Config>
class FwdStages {
  public:
    __device__ explicit FwdStages(const ThreadSmem& smem)
        : stages_(smem, 0, kFwdStageWords<Config>) {}

    __device__ __forceinline__ void copy(const NormFwdParams& params, const WalkedRow& row,
                                         const RowColumns<Config>& columns, int stage) const {
        const RowShape& shape = params.problem.rows;
        stages_.template copy<Config::kXDType>(params.x, shape, params.x_strides, row, columns,
                                               stage, 0);
        if (!Config::kHasResidual) return;
        stages_.template copy<Config::kXDType>(params.residual, shape, params.residual_strides, row,
                                               columns, stage, Config::kVecs);
    }

    /// Pack v of x, or of x + residual.
    __device__ __forceinline__ typename Config::SumPack get_sum(int stage, int v) const {
        typename Config::SumPack sum = stages_.template get<Config::kXDType>(stage, 0, v);
        if constexpr (Config::kHasResidual) {
            float values[Config::kPack];
            float added[Config::kPack];
            sum.get(values);
            stages_.template get<Config::kXDType>(stage, Config::kVecs, v).get(added);
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) values[i] += added[i];
            sum.set(values);
        }
        return sum;
    }

  private:
    RowStages<Config> stages_;
};

/// The first half of a row: sends a thread's part of what is added up over it (in RMSNorm the
/// squares alone), and stores the sum if it is wanted. Several warps share a row, so that nothing
/// of the sums stays with the thread.
template <class Config>
__device__ __forceinline__ void send_row(const NormFwdParams& params,
                                         const FwdStages<Config>& stages, int stage,
                                         const WalkedRow& row, const RowColumns<Config>& columns,
                                         RowReducer<typename Config::Arch>& reducer) {
    const int64_t start = row.start(params.problem);
    RowMoments moments;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        const typename Config::SumPack sum = stages.get_sum(stage, v);
        if (Config::kHasResidual && params.residual_out != nullptr && columns.is_inside(v)) {
            sum.store(params.residual_out, start + columns.column(v));
        }
        if constexpr (Config::kLayerNorm) {
            add_pack<Config>(sum, v, columns.is_inside(v), moments);
        } else {
            moments.squares += pack_squares<Config, false>(sum);
        }
    }
    if constexpr (Config::kLayerNorm) {
        reducer.send(moments, columns.is_even);
    } else {
        float squares[1] = {moments.squares};
        reducer.send(squares);
    }
}

/// Of the row that was sent first among those not received.
template <class Config>
__device__ __forceinline__ RowStats receive_row(const NormProblem& problem,
                                                const Rounding& rounding,
                                                RowReducer<typename Config::Arch>& reducer) {
    RowMoments moments;
    if constexpr (Config::kLayerNorm) {
        reducer.receive(moments, problem.inv_hidden_size);
    } else {
        float squares[1] = {};
        reducer.receive(squares);
        moments.squares = squares[0];
    }
    return {__fmul_rn(moments.sum, problem.inv_hidden_size),
            row_rstd<Config::kXDType>(problem, rounding, moments.squares)};
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, 1)
    norm_fwd_cluster_kernel(const __grid_constant__ NormFwdClusterParams kernel_params) {
    extern __shared__ uint4 dynamic_smem[];
    __shared__ RowSumStorage<typename Config::Arch> row_sum_smem;
    const NormFwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const Rounding rounding = rounding_of<Config>(problem);
    RowReducer<typename Config::Arch> reducer(row_sum_smem);
    const RowColumns<Config> columns(problem, reducer);
    const int num_stages = kernel_params.num_stages;
    const FwdStages<Config> stages(ThreadSmem(dynamic_smem, num_stages * kFwdStageWords<Config>));
    const RowWalk walk(reducer, kernel_params.num_steps, num_stages);
    const auto copy = [&](int step, int stage) {
        stages.copy(params, WalkedRow(problem, step), columns, stage);
    };
    reducer.wait_for_cluster();
    wait_for_earlier_kernels<typename Config::Arch>();

    walk.copy_first_steps(copy);
    const OutFormula formula = out_formula<Config>(params, rounding);
    EarlyFactors<Config> factors(params, formula, columns);

    // One row ahead: what a row's sums take between warps and CTAs is hidden by the next row's
    // first half.
    int stage = num_stages - 1;
    for (int step = walk.first_step - walk.num_blocks; step < walk.num_steps;
         step += walk.num_blocks) {
        const int next_step = step + walk.num_blocks;
        const int next_stage = walk.next_stage(stage);
        if (next_step < walk.num_steps) {
            wait_for_stage(num_stages - 1);
            send_row(params, stages, next_stage, WalkedRow(problem, next_step), columns, reducer);
        }
        if (step >= walk.first_step) {
            const RowStats stats = receive_row<Config>(problem, rounding, reducer);
            const auto get_sum = [&](int v) { return stages.get_sum(stage, v); };
            if (Config::kXDType == DType::kFloat16) factors.keep_packed();
            store_row(params, rounding, formula, WalkedRow(problem, step), columns, factors,
                      get_sum, stats);
            walk.copy_later_step(step, stage, copy);
        }
        reducer.sync();
        stage = next_stage;
    }
}

}  // namespace flash_attn_norm
