#pragma once

#include <cstdint>

#include "norms/norm_bwd_column_sums.cuh"
#include "norms/norm_bwd_params.h"
#include "norms/norm_bwd_row.cuh"
#include "norms/norm_math.cuh"
#include "norms/row_columns.cuh"
#include "norms/row_stages.cuh"
#include "norms/row_sums.cuh"

// The backward pass of both norms where rows are aligned: persistent CTAs walk over the rows, with
// the next rows' loads in flight, and keep the sums for dweight and dbias in registers.

namespace flash_attn_norm {

/// kVecs packs of 16 bytes of dout per thread.
template <DType kXDType_, DType kSumDType_, bool kLayerNorm_, int kVecs_, class Arch_>
struct BwdConfig {
    static constexpr DType kXDType = kXDType_;
    static constexpr DType kSumDType = kSumDType_;
    static constexpr bool kLayerNorm = kLayerNorm_;
    static constexpr int kVecs = kVecs_;
    static constexpr int kPack = pack_size(kXDType);
    using Arch = Arch_;
    static constexpr int kMaxThreads = 512;  // per CTA
    static constexpr bool kIsEven = false;   // see RowColumns
    /// What stays in registers between the halves of a row, where the sums for dweight and dbias
    /// leave room for it; the rest is computed again.
    static constexpr bool kHoldsDxhat =
        kXDType != DType::kFloat32 && kSumDType == kXDType && kVecs * kPack <= 16;
    static constexpr bool kHoldsXhat = kHoldsDxhat && !kLayerNorm;
    /// Row sums: of dxhat * xhat, and for LayerNorm of dxhat.
    static constexpr int kSums = kLayerNorm ? 2 : 1;

    using XPack = PackWords<kPack, kXDType>;
    using SumPack = PackWords<kPack, kSumDType>;
    using Columns = float[kVecs][kPack];
    /// 16-byte words of shared memory that a thread has for its weights.
    static constexpr int kWeightWords = kVecs * kPack / 4;
};

/// 16-byte words that a thread has in a stage: dout, the sum, and dresidual_out if there is one.
template <class Config>
FAN_HOST_DEVICE int stage_words(bool has_dresidual_out) {
    constexpr int kSumWords = Config::SumPack::kWords;
    return Config::kVecs * (1 + kSumWords * (has_dresidual_out ? 2 : 1));
}

/// dout, the sum and dresidual_out of the steps in flight.
template <class Config>
class BwdStages {
  public:
    __device__ BwdStages(const ThreadSmem& smem, const NormBwdParams& params)
        : stages_(smem, Config::kWeightWords,
                  stage_words<Config>(params.dresidual_out != nullptr)) {}

    __device__ __forceinline__ void copy(const NormBwdParams& params, const WalkedRow& row,
                                         const RowColumns<Config>& columns, int stage) const {
        const RowShape& shape = params.problem.rows;
        stages_.template copy<Config::kXDType>(params.dout, shape, params.dout_strides, row,
                                               columns, stage, 0);
        stages_.template copy<Config::kSumDType>(params.sum, shape, params.sum_strides, row,
                                                 columns, stage, kSumOffset);
        if (params.dresidual_out == nullptr) return;
        stages_.template copy<Config::kSumDType>(params.dresidual_out, shape,
                                                 params.dresidual_out_strides, row, columns, stage,
                                                 kResidualOffset);
    }
    __device__ __forceinline__ void get_dout(int stage, int v, float* values) const {
        stages_.template get<Config::kXDType>(stage, 0, v).get(values);
    }
    __device__ __forceinline__ void get_sum(int stage, int v, float* values) const {
        stages_.template get<Config::kSumDType>(stage, kSumOffset, v).get(values);
    }
    __device__ __forceinline__ void get_dresidual_out(int stage, int v, float* values) const {
        stages_.template get<Config::kSumDType>(stage, kResidualOffset, v).get(values);
    }

  private:
    static constexpr int kSumOffset = Config::kVecs;
    static constexpr int kResidualOffset = Config::kVecs * (1 + Config::SumPack::kWords);

    RowStages<Config> stages_;
};

/// The factors of a thread's columns, in its own part of shared memory: the sums for dweight leave
/// no registers for them.
template <class Config>
class BwdWeight {
  public:
    __device__ BwdWeight(const ThreadSmem& smem, const NormProblem& problem,
                         const RowColumns<Config>& columns)
        : smem_(smem) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            float weight[Config::kPack] = {};
            if (columns.is_inside(v)) {
                load_weight<Config::kPack>(problem, columns.column(v), weight);
            }
            Pack pack;
            pack.set(weight);
#pragma unroll
            for (int i = 0; i < Pack::kWords; ++i) {
                ptx::st_shared_v4(smem_.word(v * Pack::kWords + i), pack.words[i]);
            }
        }
    }
    __device__ __forceinline__ void get(int v, float* weight) const {
        Pack pack;
#pragma unroll
        for (int i = 0; i < Pack::kWords; ++i) {
            pack.words[i] = ptx::ld_shared_v4(smem_.word(v * Pack::kWords + i));
        }
        pack.get(weight);
    }

  private:
    using Pack = PackWords<Config::kPack, DType::kFloat32>;

    ThreadSmem smem_;
};

/// Zeros past the last row, whose dout is zero too.
template <class Config>
__device__ __forceinline__ BwdStats<Config> load_stats(const NormBwdParams& params,
                                                       const WalkedRow& row) {
    BwdStats<Config> stats;
    if (!row.is_inside) return stats;
    stats.rstd = __ldg(params.rstd + row.index);
    if (Config::kLayerNorm) stats.mean = __ldg(params.mean + row.index);
    return stats;
}

/// What is kept of a row from its first to its second half.
template <class Config>
struct BwdRow {
    BwdStats<Config> stats;
    float sums[Config::kSums];  // of dxhat * xhat and, for LayerNorm, of dxhat
    float xhat[Config::kHoldsXhat ? Config::kVecs : 1][Config::kPack];
    float dxhat[Config::kHoldsDxhat ? Config::kVecs : 1][Config::kPack];
};

/// The first half of a row: a thread's part of its sums, and of those for dweight and dbias.
/// kRounds says that the forward pass multiplied the weight by xhat as rounded to x's dtype.
template <class Config, bool kRounds>
__device__ __forceinline__ void accumulate_row(const BwdStages<Config>& stages, int stage,
                                               const BwdWeight<Config>& weights,
                                               BwdSums<Config>& column_sums, BwdRow<Config>& row) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) row.sums[i] = 0.0f;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        float weight[Config::kPack];
        float dout[Config::kPack];
        float xhat[Config::kPack];
        float dxhat[Config::kPack];
        weights.get(v, weight);
        stages.get_dout(stage, v, dout);
        stages.get_sum(stage, v, xhat);
        row.stats.normalize(xhat);
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) {
            dxhat[i] = __fmul_rn(dout[i], weight[i]);
            if constexpr (Config::kHoldsXhat) row.xhat[v][i] = xhat[i];
            if constexpr (Config::kHoldsDxhat) row.dxhat[v][i] = dxhat[i];
        }
        add_pack_sums<Config>(dxhat, xhat, row.sums);
        if (kRounds) {
            typename Config::XPack rounded;
            rounded.set(xhat);
            rounded.get(xhat);
        }
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) {
            column_sums.dweight[v][i] = fmaf(dout[i], xhat[i], column_sums.dweight[v][i]);
            if (Config::kLayerNorm) column_sums.dbias[v][i] += dout[i];
        }
    }
}

/// xhat and dxhat of a pack, held or computed again.
template <class Config>
__device__ __forceinline__ void get_held(const BwdStages<Config>& stages, int stage, int v,
                                         const BwdWeight<Config>& weights,
                                         const BwdRow<Config>& row, float* xhat, float* dxhat) {
    if constexpr (!Config::kHoldsXhat) {
        stages.get_sum(stage, v, xhat);
        row.stats.normalize(xhat);
    }
    if constexpr (!Config::kHoldsDxhat) {
        float weight[Config::kPack];
        weights.get(v, weight);
        stages.get_dout(stage, v, dxhat);
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) dxhat[i] = __fmul_rn(dxhat[i], weight[i]);
    }
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        if constexpr (Config::kHoldsXhat) xhat[i] = row.xhat[v][i];
        if constexpr (Config::kHoldsDxhat) dxhat[i] = row.dxhat[v][i];
    }
}

/// The second half of a row: dx as in BwdFormula, plus dresidual_out.
template <class Config>
__device__ __forceinline__ void store_dx(const NormBwdParams& params,
                                         const BwdStages<Config>& stages, int stage,
                                         const WalkedRow& place, const RowColumns<Config>& columns,
                                         const BwdWeight<Config>& weights,
                                         const BwdRow<Config>& row) {
    const BwdFormula<Config> formula(params.problem, row.stats.rstd, row.sums);
    const int64_t start = place.start(params.problem);
    float dx[Config::kVecs][Config::kPack];
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        float xhat[Config::kPack];
        get_held<Config>(stages, stage, v, weights, row, xhat, dx[v]);
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) dx[v][i] = formula.dx(dx[v][i], xhat[i]);
    }
    if (params.dresidual_out != nullptr) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            float dresidual_out[Config::kPack];
            stages.get_dresidual_out(stage, v, dresidual_out);
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) dx[v][i] += dresidual_out[i];
        }
    }
    if (!place.is_inside) return;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (!columns.is_inside(v)) continue;
        store_floats<Config::kXDType, Config::kPack>(params.dx, start + columns.column(v), dx[v]);
    }
    if (params.dresidual == nullptr) return;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (!columns.is_inside(v)) continue;
        store_floats<DType::kFloat32, Config::kPack>(params.dresidual, start + columns.column(v),
                                                     dx[v]);
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, 1)
    norm_bwd_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    extern __shared__ uint4 dynamic_smem[];
    __shared__ RowSumStorage<typename Config::Arch> row_sum_smem;
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<typename Config::Arch> reducer(row_sum_smem);
    const RowColumns<Config> columns(problem, reducer);
    const int num_stages = kernel_params.num_stages;
    const ThreadSmem thread_smem(
        dynamic_smem,
        Config::kWeightWords + num_stages * stage_words<Config>(params.dresidual_out != nullptr));
    const BwdStages<Config> stages(thread_smem, params);
    const RowWalk walk(reducer, kernel_params.num_steps, num_stages);
    const auto copy = [&](int step, int stage) {
        stages.copy(params, WalkedRow(problem, step), columns, stage);
    };
    reducer.wait_for_cluster();
    wait_for_earlier_kernels<typename Config::Arch>();

    walk.copy_first_steps(copy);
    const BwdWeight<Config> weights(thread_smem, problem, columns);
    BwdSums<Config> column_sums;

    // One row ahead: what a row's sums take between warps and CTAs is hidden by the next row's
    // first half. `row` is the one that is finished.
    BwdRow<Config> row, next_row;
    BwdStats<Config> later_stats = load_stats<Config>(params, WalkedRow(problem, walk.first_step));
    int stage = num_stages - 1;
    for (int step = walk.first_step - walk.num_blocks; step < walk.num_steps;
         step += walk.num_blocks) {
        const int next_step = step + walk.num_blocks;
        const int next_stage = walk.next_stage(stage);
        if (next_step < walk.num_steps) {
            next_row.stats = later_stats;
            later_stats =
                load_stats<Config>(params, WalkedRow(problem, next_step + walk.num_blocks));
            wait_for_stage(num_stages - 1);
            if (rounding.xhat) {
                accumulate_row<Config, true>(stages, next_stage, weights, column_sums, next_row);
            } else {
                accumulate_row<Config, false>(stages, next_stage, weights, column_sums, next_row);
            }
            reducer.send(next_row.sums);
        }
        if (step >= walk.first_step) {
            reducer.receive(row.sums);
            store_dx(params, stages, stage, WalkedRow(problem, step), columns, weights, row);
            walk.copy_later_step(step, stage, copy);
        }
        reducer.sync();
        row = next_row;
        stage = next_stage;
    }

    ptx::cp_async_wait_group<0>();
    float4* smem = reinterpret_cast<float4*>(dynamic_smem);
    const int64_t partial_row = int64_t{walk.first_step} * problem.hidden_size;
    const bool is_alone = walk.num_blocks == 1;
    if (params.dweight != nullptr) {
        void* target = is_alone ? params.dweight : kernel_params.dweight_partial + partial_row;
        store_column_sums<Config>(column_sums.dweight, smem, columns, target,
                                  is_alone ? problem.weight_dtype : DType::kFloat32);
    }
    if (Config::kLayerNorm && params.dbias != nullptr) {
        void* target = is_alone ? params.dbias : kernel_params.dbias_partial + partial_row;
        store_column_sums<Config>(column_sums.dbias, smem, columns, target,
                                  is_alone ? params.dbias_dtype : DType::kFloat32);
    }
}

}  // namespace flash_attn_norm
