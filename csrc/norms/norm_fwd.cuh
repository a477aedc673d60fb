#pragma once

#include <cstdint>

#include "norms/alignment.h"
#include "norms/launch.cuh"
#include "norms/norm_math.cuh"
#include "norms/row_sums.cuh"

// The forward pass of both norms. norm_fwd_kernel keeps a row in the registers of one group of
// threads, so that x is read once; norm_fwd_loop_kernel takes any size and alignment.

namespace flash_attn_norm {

/// kVecs packs of 16 bytes of x per thread in each of kRows rows.
template <DType kXDType_, DType kSumDType_, bool kLayerNorm_, int kVecs_, int kRows_, class Arch_>
struct FwdConfig {
    static constexpr DType kXDType = kXDType_;
    static constexpr DType kSumDType = kSumDType_;
    static constexpr bool kLayerNorm = kLayerNorm_;
    static constexpr int kVecs = kVecs_;
    static constexpr int kRows = kRows_;
    static constexpr int kPack = pack_size(kXDType);
    using Arch = Arch_;
    /// Per CTA. One row takes one warp at most where a thread has several. 448 threads of 72
    /// registers, so that two CTAs share a multiprocessor: loads of one overlap with stores of the
    /// other. A float32 sum beside a 16-bit x takes more, and so do many packs a thread.
    static constexpr int kMaxThreads = kRows > 1 ? 128 : kVecs > 4 ? 512 : 448;
    static constexpr int kMinCtas = kSumDType != kXDType || kVecs > 4 ? 1 : kRows > 1 ? 7 : 2;
    /// Weights are requested before the row sums, which hides their latency, where there are
    /// registers for them.
    static constexpr bool kLoadsWeightEarly = kVecs <= 4;

    /// A pack of the sum, as it lies in memory: in registers it takes half the room of floats.
    using SumPack = PackWords<kPack, kSumDType>;
    using SumTile = SumPack[kRows][kVecs];
};

/// Which columns and rows a thread has.
template <class Config>
struct FwdPlace {
    int first_column;  // of its first pack; the next ones are `step` apart
    int end_column;
    int64_t rows[Config::kRows];
    bool is_row[Config::kRows];

    __device__ FwdPlace(const NormProblem& problem,
                        const RowReducer<typename Config::Arch>& reducer) {
        const int packs = static_cast<int>(problem.hidden_size) / Config::kPack;
        const int packs_per_cta = (packs + reducer.cluster_size() - 1) / reducer.cluster_size();
        const int first_pack = reducer.cluster_rank() * packs_per_cta;
        first_column = (first_pack + threadIdx.x) * Config::kPack;
        end_column = min(first_pack + packs_per_cta, packs) * Config::kPack;
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            rows[r] = (int64_t{reducer.block()} * Config::kRows + r) * blockDim.y + threadIdx.y;
            is_row[r] = rows[r] < problem.rows.num_rows;
        }
    }

    __device__ int column(int v) const {
        return first_column + v * static_cast<int>(blockDim.x) * Config::kPack;
    }
    __device__ bool is_column(int v) const { return column(v) < end_column; }
};

/// x + residual, rounded to the sum's dtype. A few packs at a time: with all of the residual beside
/// all of x there would not be enough registers.
template <class Config, DType kResidualDType>
__device__ __forceinline__ void add_row(
    const NormFwdParams& params, const FwdPlace<Config>& place, int r,
    const PackWords<Config::kPack, Config::kXDType> (&x)[Config::kVecs],
    typename Config::SumPack (&sum)[Config::kVecs]) {
    constexpr int kAtOnce = Config::kVecs < 4 ? Config::kVecs : 4;
    const int64_t start = row_offset(params.problem.rows, params.residual_strides, place.rows[r]);
#pragma unroll
    for (int first = 0; first < Config::kVecs; first += kAtOnce) {
        PackWords<Config::kPack, kResidualDType> residual[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            residual[i].load(params.residual, start + place.column(first + i),
                             place.is_row[r] && place.is_column(first + i));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float values[Config::kPack];
            float added[Config::kPack];
            x[first + i].get(values);
            residual[i].get(added);
#pragma unroll
            for (int j = 0; j < Config::kPack; ++j) values[j] += added[j];
            sum[first + i].set(values);
        }
    }
}

/// x, or x + residual, which is stored if it is wanted; zeros outside the tensor.
template <class Config>
__device__ __forceinline__ void load_sum(const NormFwdParams& params, const FwdPlace<Config>& place,
                                         typename Config::SumTile& sum) {
    const NormProblem& problem = params.problem;
    PackWords<Config::kPack, Config::kXDType> x[Config::kRows][Config::kVecs];
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
        const int64_t start = row_offset(problem.rows, params.x_strides, place.rows[r]);
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            x[r][v].load(params.x, start + place.column(v), place.is_row[r] && place.is_column(v));
        }
    }
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
        if (params.residual == nullptr) {
#pragma unroll
            for (int v = 0; v < Config::kVecs; ++v) convert(x[r][v], sum[r][v]);
        } else if (Config::kSumDType == Config::kXDType ||
                   params.residual_dtype == Config::kXDType) {
            add_row<Config, Config::kXDType>(params, place, r, x[r], sum[r]);
        } else {  // a residual in float32 makes the sum float32
            add_row<Config, DType::kFloat32>(params, place, r, x[r], sum[r]);
        }
    }
    if (params.residual_out == nullptr) return;
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            if (!place.is_row[r] || !place.is_column(v)) continue;
            sum[r][v].store(params.residual_out,
                            place.rows[r] * problem.hidden_size + place.column(v));
        }
    }
}

/// mean (0 for RMSNorm) and rstd of each row.
template <class Config>
__device__ __forceinline__ void row_stats(const NormProblem& problem, const Rounding& rounding,
                                          const FwdPlace<Config>& place,
                                          const typename Config::SumTile& sum,
                                          RowReducer<typename Config::Arch>& reducer,
                                          float (&mean)[Config::kRows],
                                          float (&rstd)[Config::kRows]) {
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) mean[r] = 0.0f;
    if (Config::kLayerNorm) {
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
#pragma unroll
            for (int v = 0; v < Config::kVecs; ++v) {
                float values[Config::kPack];
                sum[r][v].get(values);
                float part = 0.0f;
#pragma unroll
                for (int i = 0; i < Config::kPack; ++i) part += values[i];
                mean[r] += part;
            }
        }
        reducer.sum(mean);
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) mean[r] *= problem.inv_hidden_size;
    }
    float squares[Config::kRows];
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
        squares[r] = 0.0f;
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            // Outside the row lie zeros, whose distance to the mean must not count.
            const float row_mean = Config::kLayerNorm && place.is_column(v) ? mean[r] : 0.0f;
            float values[Config::kPack];
            sum[r][v].get(values);
            float part = 0.0f;
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                const float deviation = values[i] - row_mean;
                if (!Config::kLayerNorm && rounding.stats) {
                    part += round_to<Config::kXDType>(__fmul_rn(deviation, deviation));
                } else {
                    part = fmaf(deviation, deviation, part);
                }
            }
            squares[r] += part;
            if (Config::kVecs > 4) __syncwarp();  // as in store_out
        }
    }
    reducer.sum(squares);
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
        rstd[r] = row_rstd<Config::kXDType>(problem, rounding, squares[r]);
    }
}

/// The weights of a thread's columns, as they lie in memory if they fill 16 bytes per pack.
template <class Config>
struct FwdWeight {
    uint4 words[Config::kLoadsWeightEarly ? Config::kVecs : 1];
    bool is_pack;

    __device__ FwdWeight(const NormProblem& problem, const FwdPlace<Config>& place)
        : is_pack(problem.weight != nullptr &&
                  size_of(problem.weight_dtype) * Config::kPack == 16) {
        if constexpr (Config::kLoadsWeightEarly) {
#pragma unroll
            for (int v = 0; v < Config::kVecs; ++v) {
                words[v] = make_uint4(0, 0, 0, 0);
                if (is_pack && place.is_column(v)) words[v] = load(problem, place.column(v));
            }
        }
    }

    static __device__ uint4 load(const NormProblem& problem, int column) {
        return *reinterpret_cast<const uint4*>(static_cast<const char*>(problem.weight) +
                                               column * size_of(problem.weight_dtype));
    }
    __device__ uint4 get_words(const NormProblem& problem, int v, int column) const {
        if constexpr (Config::kLoadsWeightEarly) return words[v];
        return load(problem, column);
    }
    __device__ void get(const NormProblem& problem, int v, int column, float* weight) const {
        if (!is_pack) {
            load_weight<Config::kPack>(problem, column, weight);
            return;
        }
        const uint4 pack = get_words(problem, v, column);
        if constexpr (Config::kPack == 4) {
            unpack<DType::kFloat32>(pack, weight);
        } else if (problem.weight_dtype == DType::kBFloat16) {
            unpack<DType::kBFloat16>(pack, weight);
        } else {
            unpack<DType::kFloat16>(pack, weight);
        }
        add_weight_offset<Config::kPack>(problem, weight);
    }
};

/// out of one pack, for any dtypes and casting mode.
template <class Config>
__device__ __forceinline__ PackWords<Config::kPack, Config::kXDType> out_pack(
    const NormFwdParams& params, const Rounding& rounding, int column,
    const typename Config::SumPack& sum, const float* weight, float mean, float rstd) {
    PackWords<Config::kPack, Config::kXDType> out;
    float values[Config::kPack];
    sum.get(values);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) values[i] = __fmul_rn(values[i] - mean, rstd);
    if (!Config::kLayerNorm && rounding.xhat) {
        out.set(values);
        out.get(values);
    }
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) values[i] *= weight[i];
    add_bias<Config::kPack>(params, column, values);
    out.set(values);
    return out;
}

/// The same where xhat is rounded to the dtype that x and the weight share: the product, exact in
/// float32, is rounded to that dtype once, which one instruction does for two elements.
template <class Config>
__device__ __forceinline__ PackWords<Config::kPack, Config::kXDType> out_pack_same_dtype(
    const typename Config::SumPack& sum, const uint4& weight, float rstd) {
    PackWords<Config::kPack, Config::kXDType> out;
    float values[Config::kPack];
    sum.get(values);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) values[i] = __fmul_rn(values[i], rstd);
    out.set(values);
    out.words[0] = mul_packed<Config::kXDType>(out.words[0], weight);
    return out;
}

template <class Config>
__device__ __forceinline__ void store_out(const NormFwdParams& params, const Rounding& rounding,
                                          const FwdPlace<Config>& place,
                                          const FwdWeight<Config>& weights,
                                          const typename Config::SumTile& sum,
                                          const float (&mean)[Config::kRows],
                                          const float (&rstd)[Config::kRows]) {
    const NormProblem& problem = params.problem;
    constexpr bool kCanShare = !Config::kLayerNorm && Config::kXDType == Config::kSumDType &&
                               Config::kXDType != DType::kFloat32;
    const bool shares_dtype = kCanShare && rounding.xhat && weights.is_pack &&
                              problem.weight_dtype == Config::kXDType &&
                              problem.weight_offset == 0.0f && params.bias == nullptr;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        const int column = place.column(v);
        PackWords<Config::kPack, Config::kXDType> out[Config::kRows];
        if (!place.is_column(v)) {
            // nothing to compute
        } else if (shares_dtype) {
            if constexpr (kCanShare) {
                const uint4 weight = weights.get_words(problem, v, column);
#pragma unroll
                for (int r = 0; r < Config::kRows; ++r) {
                    out[r] = out_pack_same_dtype<Config>(sum[r][v], weight, rstd[r]);
                }
            }
        } else {
            float weight[Config::kPack];
            weights.get(problem, v, column, weight);
#pragma unroll
            for (int r = 0; r < Config::kRows; ++r) {
                out[r] = out_pack<Config>(params, rounding, column, sum[r][v], weight,
                                          Config::kLayerNorm ? mean[r] : 0.0f, rstd[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            if (!place.is_row[r] || !place.is_column(v)) continue;
            out[r].store(params.out, place.rows[r] * problem.hidden_size + column);
        }
        // Keeps the compiler from starting on many packs at once, for which there are no registers.
        if (Config::kVecs > 4) __syncwarp();
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, Config::kMinCtas)
    norm_fwd_kernel(const __grid_constant__ NormFwdParams params) {
    __shared__ RowSumStorage smem;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<typename Config::Arch> reducer(smem);
    const FwdPlace<Config> place(problem, reducer);
    wait_for_earlier_kernels<typename Config::Arch>();

    typename Config::SumTile sum;
    load_sum(params, place, sum);
    const FwdWeight<Config> weights(problem, place);

    float mean[Config::kRows];
    float rstd[Config::kRows];
    row_stats(problem, rounding, place, sum, reducer, mean, rstd);
    store_out(params, rounding, place, weights, sum, mean, rstd);
    if (threadIdx.x == 0 && reducer.cluster_rank() == 0) {
#pragma unroll
        for (int r = 0; r < Config::kRows; ++r) {
            if (!place.is_row[r]) continue;
            params.rstd[place.rows[r]] = rstd[r];
            if (Config::kLayerNorm) params.mean[place.rows[r]] = mean[r];
        }
    }
}

// ---- any size and alignment ----

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
    __shared__ RowSumStorage smem;
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

// ---- launch ----

template <class Config>
void launch_norm_fwd_config(const NormFwdParams& params, int cluster_size, cudaStream_t stream) {
    constexpr int kThreads = 128;
    const int64_t packs = params.problem.hidden_size / Config::kPack;
    const int64_t packs_per_cta = (packs + cluster_size - 1) / cluster_size;
    LaunchShape shape;
    shape.threads_per_row = threads_for_row(packs_per_cta, Config::kVecs, Config::kMaxThreads);
    shape.row_slots = row_slots_for(shape.threads_per_row, kThreads);
    shape.cluster_size = cluster_size;
    const int64_t rows_per_cta = int64_t{shape.row_slots} * Config::kRows;
    shape.num_ctas =
        (params.problem.rows.num_rows + rows_per_cta - 1) / rows_per_cta * cluster_size;
    launch<typename Config::Arch>(&norm_fwd_kernel<Config>, shape, params, "norm_fwd", stream);
}

template <DType kXDType, int kWidth, class Arch>
void launch_norm_fwd_loop(const NormFwdParams& params, cudaStream_t stream) {
    LaunchShape shape;
    shape.threads_per_row = threads_for_row(params.problem.hidden_size, 4 * kWidth, 512);
    shape.row_slots = row_slots_for(shape.threads_per_row, 128);
    shape.num_ctas = (params.problem.rows.num_rows + shape.row_slots - 1) / shape.row_slots;
    launch<Arch>(&norm_fwd_loop_kernel<kXDType, kWidth, Arch>, shape, params, "norm_fwd_loop",
                 stream);
}

/// True if every row of every tensor starts at a multiple of 16 bytes and has whole packs.
inline bool has_aligned_rows(const NormFwdParams& params) {
    const NormProblem& problem = params.problem;
    return problem.hidden_size % pack_size(problem.x_dtype) == 0 &&
           is_aligned(params.x, problem.x_dtype, problem.rows, params.x_strides) &&
           is_aligned(params.residual, params.residual_dtype, problem.rows,
                      params.residual_strides) &&
           is_aligned(problem.weight) && is_aligned(params.bias) && is_aligned(params.out) &&
           is_aligned(params.residual_out);
}

template <DType kXDType, DType kSumDType, bool kLayerNorm, class Arch>
void launch_norm_fwd_dtypes(const NormFwdParams& params, cudaStream_t stream) {
    // More packs a thread where a row takes more than one CTA of the usual size.
    using LongRows = FwdConfig<kXDType, kSumDType, kLayerNorm, 4, 1, Arch>;
    using LongestRows = FwdConfig<kXDType, kSumDType, kLayerNorm, 8, 1, Arch>;
    constexpr int64_t kLongPacks = LongRows::kVecs * LongRows::kMaxThreads;
    constexpr int64_t kLongestPacks = LongestRows::kVecs * LongestRows::kMaxThreads;
    constexpr int kMaxCluster = Arch::kHasClusters ? kMaxClusterSize : 1;
    if (!has_aligned_rows(params)) return launch_norm_fwd_loop<kXDType, 1, Arch>(params, stream);
    const int64_t packs = params.problem.hidden_size / pack_size(kXDType);
    if (packs <= 32) {
        using ShortRows = FwdConfig<kXDType, kSumDType, kLayerNorm, 1, 4, Arch>;
        return launch_norm_fwd_config<ShortRows>(params, 1, stream);
    }
    if (packs <= kLongPacks) return launch_norm_fwd_config<LongRows>(params, 1, stream);
    for (int cluster_size = 1; cluster_size <= kMaxCluster; cluster_size *= 2) {
        if (packs <= cluster_size * kLongestPacks) {
            return launch_norm_fwd_config<LongestRows>(params, cluster_size, stream);
        }
    }
    launch_norm_fwd_loop<kXDType, pack_size(kXDType), Arch>(params, stream);
}

template <DType kXDType, bool kLayerNorm, class Arch>
void launch_norm_fwd_norm(const NormFwdParams& params, cudaStream_t stream) {
    if (params.problem.sum_dtype == kXDType) {
        launch_norm_fwd_dtypes<kXDType, kXDType, kLayerNorm, Arch>(params, stream);
    } else {
        launch_norm_fwd_dtypes<kXDType, DType::kFloat32, kLayerNorm, Arch>(params, stream);
    }
}

template <DType kXDType, class Arch>
void launch_norm_fwd_dtype(const NormFwdParams& params, cudaStream_t stream) {
    if (params.problem.is_layer_norm) {
        launch_norm_fwd_norm<kXDType, true, Arch>(params, stream);
    } else {
        launch_norm_fwd_norm<kXDType, false, Arch>(params, stream);
    }
}

template <class Arch>
void launch_norm_fwd(const NormFwdParams& params, cudaStream_t stream) {
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            return launch_norm_fwd_dtype<DType::kFloat32, Arch>(params, stream);
        case DType::kBFloat16:
            return launch_norm_fwd_dtype<DType::kBFloat16, Arch>(params, stream);
        case DType::kFloat16:
            return launch_norm_fwd_dtype<DType::kFloat16, Arch>(params, stream);
    }
}

}  // namespace flash_attn_norm
