#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_bwd_params.h"
#include "norms/norm_math.cuh"
#include "norms/row_sums.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_address.cuh"

// The backward pass of both norms where rows are aligned: persistent CTAs walk over the rows, with
// the next rows' loads in flight, and keep the sums for dweight and dbias in registers.

namespace flash_attn_norm {

/// kVecs packs of 16 bytes of dout per thread in each of kRows rows.
template <DType kXDType_, DType kSumDType_, bool kLayerNorm_, int kVecs_, int kRows_, class Arch_>
struct BwdConfig {
    static constexpr DType kXDType = kXDType_;
    static constexpr DType kSumDType = kSumDType_;
    static constexpr bool kLayerNorm = kLayerNorm_;
    static constexpr int kVecs = kVecs_;
    static constexpr int kRows = kRows_;
    static constexpr int kPack = pack_size(kXDType);
    using Arch = Arch_;
    /// Per CTA. One row takes one warp at most where a thread has several.
    static constexpr int kMaxThreads = kRows > 1 ? 256 : 512;
    /// What the registers are divided by: 80 a thread where that is enough, else 128.
    static constexpr int kBoundThreads =
        !kLayerNorm && kSumDType == kXDType && kVecs <= 2 ? 768 : 512;
    /// Weights stay in registers, or in shared memory where the sums for dweight leave no room.
    static constexpr bool kSharesWeight = kVecs > 2;
    static constexpr int kWeightWords = kSharesWeight ? kVecs * kPack / 4 : 0;  // per thread
    /// Row sums: of dxhat * xhat, and for LayerNorm of dxhat.
    static constexpr int kSums = kLayerNorm ? 2 : 1;

    using DoutPack = PackWords<kPack, kXDType>;
    using SumPack = PackWords<kPack, kSumDType>;
    using Columns = float[kVecs][kPack];
};

/// 16-byte words that a thread has in a stage: dout, the sum, and dresidual_out if there is one.
template <class Config>
FAN_HOST_DEVICE int stage_words(bool has_dresidual_out) {
    constexpr int kPacks = Config::kRows * Config::kVecs;
    constexpr int kSumWords = Config::SumPack::kWords;
    return kPacks * (Config::DoutPack::kWords + kSumWords * (has_dresidual_out ? 2 : 1));
}

/// Which columns a thread has.
template <class Config>
struct BwdColumns {
    int first;  // of its first pack; the next ones are `step` apart
    int end;

    __device__ BwdColumns(const NormProblem& problem,
                          const RowReducer<typename Config::Arch>& reducer) {
        const int packs = static_cast<int>(problem.hidden_size) / Config::kPack;
        const int packs_per_cta = (packs + reducer.cluster_size() - 1) / reducer.cluster_size();
        const int first_pack = reducer.cluster_rank() * packs_per_cta;
        first = (first_pack + threadIdx.x) * Config::kPack;
        end = min(first_pack + packs_per_cta, packs) * Config::kPack;
    }
    __device__ int column(int v) const {
        return first + v * static_cast<int>(blockDim.x) * Config::kPack;
    }
    __device__ bool is_inside(int v) const { return column(v) < end; }
};

/// The rows of one step of a CTA; a step that lies past the last row has none.
template <class Config>
struct BwdRows {
    int64_t rows[Config::kRows];
    bool is_row[Config::kRows];

    __device__ BwdRows(const NormProblem& problem, int step) {
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            rows[r] = (int64_t{step} * Config::kRows + r) * blockDim.y + threadIdx.y;
            is_row[r] = rows[r] < problem.rows.num_rows;
        }
    }
};

/// 16-byte words of shared memory that a thread has: its weights, then the stages.
template <class Config>
FAN_HOST_DEVICE int thread_words(int stage_words, int num_stages) {
    return Config::kWeightWords + num_stages * stage_words;
}

/// Where a thread's words of shared memory lie: those of one index side by side, because a copy of
/// 16 bytes a thread is fast only where neighbours copy to neighbouring places.
struct ThreadSmem {
    uint4* first;
    int num_threads;

    __device__ explicit ThreadSmem(uint4* smem)
        : first(smem + threadIdx.y * blockDim.x + threadIdx.x),
          num_threads(blockDim.x * blockDim.y) {}
    __device__ uint4* word(int index) const { return first + index * num_threads; }
};

/// A thread's own part of shared memory, which holds the rows in flight: what it copies there, only
/// it reads, so that no barrier is needed.
template <class Config>
class BwdStages {
  public:
    __device__ BwdStages(const ThreadSmem& smem, const NormBwdParams& params)
        : smem_(smem), stage_words_(stage_words<Config>(params.dresidual_out != nullptr)) {}

    __device__ void copy(const NormBwdParams& params, const BwdRows<Config>& rows,
                         const BwdColumns<Config>& columns, int stage) const {
        constexpr int kSumWords = Config::SumPack::kWords;
        copy_tensor<Config::kXDType, 1>(params, params.dout, params.dout_strides, rows, columns,
                                        stage, 0);
        copy_tensor<Config::kSumDType, kSumWords>(params, params.sum, params.sum_strides, rows,
                                                  columns, stage, 1);
        if (params.dresidual_out == nullptr) return;
        copy_tensor<Config::kSumDType, kSumWords>(params, params.dresidual_out,
                                                  params.dresidual_out_strides, rows, columns,
                                                  stage, 1 + kSumWords);
    }

    __device__ void get_dout(int stage, int r, int v, float* values) const {
        get<Config::kXDType, 1>(stage, 0, r, v, values);
    }
    __device__ void get_sum(int stage, int r, int v, float* values) const {
        get<Config::kSumDType, Config::SumPack::kWords>(stage, 1, r, v, values);
    }
    __device__ void get_dresidual_out(int stage, int r, int v, float* values) const {
        constexpr int kSumWords = Config::SumPack::kWords;
        get<Config::kSumDType, kSumWords>(stage, 1 + kSumWords, r, v, values);
    }

  private:
    __device__ uint4* slot(int stage, int word, int r, int v) const {
        return smem_.word(Config::kWeightWords + stage * stage_words_ +
                          (word * Config::kRows + r) * Config::kVecs + v);
    }

    template <DType kDType, int kWords>
    __device__ void copy_tensor(const NormBwdParams& params, const void* tensor,
                                const RowStrides& strides, const BwdRows<Config>& rows,
                                const BwdColumns<Config>& columns, int stage,
                                int first_word) const {
        constexpr int kBytes = size_of(kDType);
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            const int64_t start = row_offset(params.problem.rows, strides, rows.rows[r]);
#pragma unroll 1
            for (int v = 0; v < Config::kVecs; ++v) {
                const bool is_inside = rows.is_row[r] && columns.is_inside(v);
                const char* source = static_cast<const char*>(tensor) +
                                     (is_inside ? (start + columns.column(v)) * kBytes : 0);
#pragma unroll
                for (int word = 0; word < kWords; ++word) {
                    const uint32_t target =
                        ptx::shared_address(slot(stage, first_word + word, r, v));
                    ptx::cp_async_16(target, source + 16 * word, is_inside ? 16 : 0);
                }
            }
        }
    }

    template <DType kDType, int kWords>
    __device__ void get(int stage, int first_word, int r, int v, float* values) const {
        PackWords<Config::kPack, kDType> pack;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            pack.words[word] = *slot(stage, first_word + word, r, v);
        }
        pack.get(values);
    }

    ThreadSmem smem_;
    int stage_words_;
};

/// The factors of a thread's columns. Where they lie in shared memory, it is its own part of it.
template <class Config>
class BwdWeight {
  public:
    __device__ BwdWeight(const ThreadSmem& smem, const NormProblem& problem,
                         const BwdColumns<Config>& columns)
        : smem_(smem) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            float weight[Config::kPack] = {};
            if (columns.is_inside(v)) {
                load_weight<Config::kPack>(problem, columns.column(v), weight);
            }
            if constexpr (Config::kSharesWeight) {
                WeightPack pack;
                pack.set(weight);
#pragma unroll
                for (int i = 0; i < WeightPack::kWords; ++i) *slot(v, i) = pack.words[i];
            } else {
                kept_[v].set(weight);
            }
        }
    }
    __device__ void get(int v, float* weight) const {
        if constexpr (Config::kSharesWeight) {
            WeightPack pack;
#pragma unroll
            for (int i = 0; i < WeightPack::kWords; ++i) pack.words[i] = *slot(v, i);
            pack.get(weight);
        } else {
            kept_[v].get(weight);
        }
    }

  private:
    using WeightPack = PackWords<Config::kPack, DType::kFloat32>;

    __device__ uint4* slot(int v, int word) const {
        return smem_.word(v * WeightPack::kWords + word);
    }

    ThreadSmem smem_;
    WeightPack kept_[Config::kSharesWeight ? 1 : Config::kVecs];
};

/// mean and rstd of the rows of a step; zeros past the last row, whose dout is zero too.
template <class Config>
struct BwdStats {
    float mean[Config::kRows];
    float rstd[Config::kRows];

    __device__ void load(const NormBwdParams& params, const BwdRows<Config>& rows) {
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            mean[r] = 0.0f;
            rstd[r] = 0.0f;
            if (!rows.is_row[r]) continue;
            rstd[r] = __ldg(params.rstd + rows.rows[r]);
            if (Config::kLayerNorm) mean[r] = __ldg(params.mean + rows.rows[r]);
        }
    }
};

/// With dxhat = dout * weight:  dx = rstd * (dxhat - xhat * mean(dxhat * xhat) - mean(dxhat)).
/// Gives the two means; the second is LayerNorm's alone.
template <class Config>
__device__ __forceinline__ void row_projections(const NormProblem& problem,
                                                const BwdStages<Config>& stages, int stage,
                                                const BwdWeight<Config>& weights,
                                                const BwdStats<Config>& stats,
                                                RowReducer<typename Config::Arch>& reducer,
                                                float (&means)[Config::kRows * Config::kSums]) {
#pragma unroll
    for (int i = 0; i < Config::kRows * Config::kSums; ++i) means[i] = 0.0f;
#pragma unroll 2  // all four at once would take more registers than there are
    for (int v = 0; v < Config::kVecs; ++v) {
        float weight[Config::kPack];
        weights.get(v, weight);
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            float dout[Config::kPack];
            float sum[Config::kPack];
            stages.get_dout(stage, r, v, dout);
            stages.get_sum(stage, r, v, sum);
            float products = 0.0f;
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                const float dxhat = dout[i] * weight[i];
                const float xhat = (sum[i] - stats.mean[r]) * stats.rstd[r];
                products = fmaf(dxhat, xhat, products);
                total += dxhat;
            }
            means[r * Config::kSums] += products;
            if (Config::kLayerNorm) means[r * Config::kSums + Config::kSums - 1] += total;
        }
    }
    reducer.sum(means);
#pragma unroll
    for (int i = 0; i < Config::kRows * Config::kSums; ++i) means[i] *= problem.inv_hidden_size;
}

/// Stores dx (and dresidual) of a step and adds to the sums for dweight and dbias.
template <class Config>
__device__ __forceinline__ void finish_step(
    const NormBwdParams& params, const Rounding& rounding, const BwdStages<Config>& stages,
    int stage, const BwdRows<Config>& rows, const BwdColumns<Config>& columns,
    const BwdWeight<Config>& weights, const BwdStats<Config>& stats,
    const float (&means)[Config::kRows * Config::kSums], typename Config::Columns& dweight,
    typename Config::Columns& dbias) {
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        float weight[Config::kPack];
        weights.get(v, weight);
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            const float projection = means[r * Config::kSums];
            const float offset =
                Config::kLayerNorm ? means[r * Config::kSums + Config::kSums - 1] : 0.0f;
            float dout[Config::kPack];
            float xhat[Config::kPack];
            float dx[Config::kPack];
            stages.get_dout(stage, r, v, dout);
            stages.get_sum(stage, r, v, xhat);
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                xhat[i] = (xhat[i] - stats.mean[r]) * stats.rstd[r];
                dx[i] = fmaf(-xhat[i], projection, dout[i] * weight[i]);
                if (Config::kLayerNorm) dx[i] -= offset;
                dx[i] *= stats.rstd[r];
            }
            if (params.dresidual_out != nullptr) {
                float dresidual_out[Config::kPack];
                stages.get_dresidual_out(stage, r, v, dresidual_out);
#pragma unroll
                for (int i = 0; i < Config::kPack; ++i) dx[i] += dresidual_out[i];
            }
            if (rounding.xhat) {  // the forward pass multiplied the weight by it as rounded
                typename Config::DoutPack rounded;
                rounded.set(xhat);
                rounded.get(xhat);
            }
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                dweight[v][i] = fmaf(dout[i], xhat[i], dweight[v][i]);
                if (Config::kLayerNorm) dbias[v][i] += dout[i];
            }
            if (rows.is_row[r] && columns.is_inside(v)) {
                const int64_t index = rows.rows[r] * params.problem.hidden_size + columns.column(v);
                store_floats<Config::kXDType, Config::kPack>(params.dx, index, dx);
                if (params.dresidual != nullptr) {
                    store_floats<DType::kFloat32, Config::kPack>(params.dresidual, index, dx);
                }
            }
            // Keeps the compiler from loading the next packs before this one is done, for which
            // there are no registers.
            if (Config::kVecs > 2) __syncwarp();
        }
    }
}

/// Adds up what the row slots of a CTA have of each column, in fixed order, and writes it: to the
/// CTA's row of `partial`, or rounded to `target` if there is no other CTA.
template <class Config>
__device__ __forceinline__ void store_column_sums(const typename Config::Columns& sums, float* smem,
                                                  int num_columns, int first_column, float* partial,
                                                  void* target, DType dtype, bool is_alone) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int slot_columns = blockDim.x * Config::kVecs * Config::kPack;
    __syncthreads();  // the others may still read what lies there
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        const int column = (v * blockDim.x + threadIdx.x) * Config::kPack;
        float* slot = smem + threadIdx.y * slot_columns + column;
#pragma unroll
        for (int i = 0; i < Config::kPack; i += 4) {
            *reinterpret_cast<float4*>(slot + i) =
                make_float4(sums[v][i], sums[v][i + 1], sums[v][i + 2], sums[v][i + 3]);
        }
    }
    __syncthreads();
    for (int column = thread; column < num_columns; column += blockDim.x * blockDim.y) {
        float total = 0.0f;
        for (int slot = 0; slot < blockDim.y; ++slot) {
            total += smem[slot * slot_columns + column];
        }
        if (is_alone) {
            store_rounded(target, dtype, first_column + column, total);
        } else {
            partial[first_column + column] = total;
        }
    }
}

__device__ __forceinline__ void wait_for_stage(int num_stages) {
    // The newest num_stages - 1 copies may be in flight; an instruction takes the number as a
    // constant.
    if (num_stages == 1) {
        ptx::cp_async_wait_group<0>();
    } else if (num_stages == 2) {
        ptx::cp_async_wait_group<1>();
    } else {
        ptx::cp_async_wait_group<2>();
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kBoundThreads, 1)
    norm_bwd_kernel(const __grid_constant__ NormBwdKernelParams kernel_params) {
    extern __shared__ uint4 dynamic_smem[];
    __shared__ RowSumStorage row_sum_smem;
    const NormBwdParams& params = kernel_params.params;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<typename Config::Arch> reducer(row_sum_smem);
    const BwdColumns<Config> columns(problem, reducer);
    const ThreadSmem thread_smem(dynamic_smem);
    const BwdStages<Config> stages(thread_smem, params);
    const int num_stages = kernel_params.num_stages;
    wait_for_earlier_kernels<typename Config::Arch>();

    const int first_step = reducer.block();
    const int num_blocks = reducer.num_blocks();
    for (int stage = 0; stage < num_stages; ++stage) {
        const int step = first_step + stage * num_blocks;
        if (step < kernel_params.num_steps) {
            stages.copy(params, BwdRows<Config>(problem, step), columns, stage);
        }
        ptx::cp_async_commit_group();
    }
    const BwdWeight<Config> weights(thread_smem, problem, columns);
    BwdStats<Config> next_stats;
    next_stats.load(params, BwdRows<Config>(problem, first_step));
    typename Config::Columns dweight = {};
    typename Config::Columns dbias = {};

    int stage = 0;
    for (int step = first_step; step < kernel_params.num_steps; step += num_blocks) {
        const BwdRows<Config> rows(problem, step);
        const BwdStats<Config> stats = next_stats;
        next_stats.load(params, BwdRows<Config>(problem, step + num_blocks));
        wait_for_stage(num_stages);

        float means[Config::kRows * Config::kSums];
        row_projections(problem, stages, stage, weights, stats, reducer, means);
        finish_step(params, rounding, stages, stage, rows, columns, weights, stats, means, dweight,
                    dbias);

        const int later_step = step + num_stages * num_blocks;
        if (later_step < kernel_params.num_steps) {
            stages.copy(params, BwdRows<Config>(problem, later_step), columns, stage);
        }
        ptx::cp_async_commit_group();
        stage = stage + 1 == num_stages ? 0 : stage + 1;
    }

    const bool is_alone = num_blocks == 1;
    const int first_column = columns.first - threadIdx.x * Config::kPack;
    const int num_columns = columns.end - first_column;
    float* smem = reinterpret_cast<float*>(dynamic_smem);
    const int64_t partial_row = int64_t{first_step} * problem.hidden_size;
    ptx::cp_async_wait_group<0>();
    if (params.dweight != nullptr) {
        store_column_sums<Config>(dweight, smem, num_columns, first_column,
                                  kernel_params.dweight_partial + partial_row, params.dweight,
                                  problem.weight_dtype, is_alone);
    }
    if (Config::kLayerNorm && params.dbias != nullptr) {
        store_column_sums<Config>(dbias, smem, num_columns, first_column,
                                  kernel_params.dbias_partial + partial_row, params.dbias,
                                  params.dbias_dtype, is_alone);
    }
}

}  // namespace flash_attn_norm
