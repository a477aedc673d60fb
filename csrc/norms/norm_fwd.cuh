#pragma once

#include <cstdint>
#include <type_traits>

#include "norms/norm_math.cuh"
#include "norms/row_columns.cuh"
#include "norms/row_sums.cuh"

// The forward pass of both norms where rows are aligned: a group of threads holds a row in
// registers, so that x is read once. The rows in flight are those of the CTAs that share a
// multiprocessor, and the next CTA starts wherever one ends: multiprocessors are not equally fast,
// and a fixed share of the rows for each would wait for the slowest.

namespace flash_attn_norm {

/// What a kernel of the forward pass takes.
///   kUsual: the residual, the sum, weight and bias in the dtype of x, see is_usual_problem. No
///   code
///       for anything else stands between the loads.
///   kAny: any weight and bias, or none, and every casting mode.
///   kWideSum: the same, where the sum is float32 beside a 16-bit x.
enum class FwdKind { kUsual, kAny, kWideSum };

/// kVecs packs of 16 bytes of x per thread.
template <DType kXDType_, bool kLayerNorm_, FwdKind kKind_, int kVecs_, class Arch_>
struct FwdConfig {
    static constexpr DType kXDType = kXDType_;
    static constexpr FwdKind kKind = kKind_;
    static constexpr bool kIsUsual = kKind == FwdKind::kUsual;
    static constexpr DType kSumDType = kKind == FwdKind::kWideSum ? DType::kFloat32 : kXDType;
    static constexpr bool kLayerNorm = kLayerNorm_;
    static constexpr int kVecs = kVecs_;
    static constexpr int kPack = pack_size(kXDType);
    using Arch = std::conditional_t<kIsUsual, WithoutClusters<Arch_>, Arch_>;
    /// What lets many bytes of rows be in flight on a multiprocessor: 64 registers a thread. A
    /// float32 sum beside a 16-bit x takes more.
    static constexpr int kMaxThreads = 512;
    static constexpr int kMinCtas = kKind == FwdKind::kWideSum ? 1 : 2;
    /// Weight and bias are requested before the row sums where there are registers for them;
    /// elsewhere they come from the L1.
    static constexpr bool kLoadsFactorsEarly = kVecs <= 2;

    using XPack = PackWords<kPack, kXDType>;
    /// A pack of the sum, as it lies in memory: in registers it takes half the room of floats.
    using SumPack = PackWords<kPack, kSumDType>;
    using SumTile = SumPack[kVecs];
    using FactorTile = uint4[kLoadsFactorsEarly ? kVecs : 1];
};

/// Where a row starts in what is read.
struct FwdRowPlaces {
    const char* x;
    const char* residual = nullptr;

    __device__ FwdRowPlaces(const NormFwdParams& params, int64_t row) {
        const NormProblem& problem = params.problem;
        x = row_start(params.x, problem.x_dtype, problem.rows, params.x_strides, row);
        if (params.residual == nullptr) return;
        residual = row_start(params.residual, params.residual_dtype, problem.rows,
                             params.residual_strides, row);
    }
};

/// x + residual, rounded to the sum's dtype. A few packs at a time: with all of the residual beside
/// all of x there would not be enough registers.
template <class Config, DType kResidualDType>
__device__ __forceinline__ void add_residual(const char* residual_row, const Row& row,
                                             const RowColumns<Config>& columns,
                                             const typename Config::XPack (&x)[Config::kVecs],
                                             typename Config::SumTile& sum) {
    constexpr int kAtOnce = Config::kVecs < 4 ? Config::kVecs : 4;
#pragma unroll
    for (int first = 0; first < Config::kVecs; first += kAtOnce) {
        PackWords<Config::kPack, kResidualDType> residual[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            residual[i].load(residual_row, columns.column(first + i),
                             row.is_inside && columns.is_inside(first + i));
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
__device__ __forceinline__ void load_sum(const NormFwdParams& params, const FwdRowPlaces& places,
                                         const Row& row, const RowColumns<Config>& columns,
                                         typename Config::SumTile& sum) {
    const NormProblem& problem = params.problem;
    typename Config::XPack x[Config::kVecs];
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        x[v].load(places.x, columns.column(v), row.is_inside && columns.is_inside(v));
    }
    if (params.residual == nullptr) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) convert(x[v], sum[v]);
    } else if (Config::kSumDType == Config::kXDType || params.residual_dtype == Config::kXDType) {
        add_residual<Config, Config::kXDType>(places.residual, row, columns, x, sum);
    } else {  // a residual in float32 makes the sum float32
        add_residual<Config, DType::kFloat32>(places.residual, row, columns, x, sum);
    }
    if (params.residual_out == nullptr || !row.is_inside) return;
    const int64_t out_start = row.index * problem.hidden_size;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (columns.is_inside(v)) sum[v].store(params.residual_out, out_start + columns.column(v));
    }
}

/// A thread's part of the row's squares, each rounded to x's dtype or not.
template <class Config, bool kRounds>
__device__ __forceinline__ float sum_of_squares(const typename Config::SumTile& sum) {
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        float values[Config::kPack];
        sum[v].get(values);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) {
            if (kRounds) {
                part += round_to<Config::kXDType>(__fmul_rn(values[i], values[i]));
            } else {
                part = fmaf(values[i], values[i], part);
            }
        }
        squares += part;
    }
    return squares;
}

/// The moments of a thread's part of the row.
template <class Config>
__device__ __forceinline__ RowMoments part_moments(const RowColumns<Config>& columns,
                                                   const typename Config::SumTile& sum) {
    RowMoments moments;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        float values[Config::kPack];
        sum[v].get(values);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) part += values[i];
        moments.sum += part;
        if (columns.is_inside(v)) moments.count += Config::kPack;
    }
    const float mean = moments.sum * RowMoments::inverse(moments.count);
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        // Outside the row lie zeros, whose distance to the mean must not count.
        const float part_mean = columns.is_inside(v) ? mean : 0.0f;
        float values[Config::kPack];
        sum[v].get(values);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < Config::kPack; ++i) {
            const float distance = values[i] - part_mean;
            part = fmaf(distance, distance, part);
        }
        moments.squares += part;
    }
    return moments;
}

/// rstd of the row, and its mean, 0 for RMSNorm.
template <class Config>
__device__ __forceinline__ float row_stats(const NormProblem& problem, const Rounding& rounding,
                                           const RowColumns<Config>& columns,
                                           const typename Config::SumTile& sum,
                                           RowReducer<typename Config::Arch>& reducer,
                                           float& mean) {
    float squares[1];
    if constexpr (Config::kLayerNorm) {
        RowMoments moments = part_moments(columns, sum);
        reducer.send(moments, columns.is_even);
        reducer.sync();
        reducer.receive(moments, problem.inv_hidden_size);
        mean = moments.sum * problem.inv_hidden_size;
        squares[0] = moments.squares;
    } else {
        mean = 0.0f;
        // One branch a row: one for each element would take longer than its arithmetic.
        if (!Config::kIsUsual && rounding.stats) {
            squares[0] = sum_of_squares<Config, true>(sum);
        } else {
            squares[0] = sum_of_squares<Config, false>(sum);
        }
        reducer.sum(squares);
    }
    return row_rstd<Config::kXDType>(problem, rounding, squares[0]);
}

/// Weight and, in LayerNorm, bias are there in the dtype of x, and nothing is added to the weight.
FAN_HOST_DEVICE bool has_factors_of_x(const NormFwdParams& params) {
    const NormProblem& problem = params.problem;
    const bool has_weight = problem.weight != nullptr && problem.weight_offset == 0.0f &&
                            problem.weight_dtype == problem.x_dtype;
    const bool has_bias = params.bias != nullptr && params.bias_dtype == problem.x_dtype;
    return has_weight && has_bias == problem.is_layer_norm;
}

FAN_HOST_DEVICE bool is_usual_problem(const NormFwdParams& params) {
    const NormProblem& problem = params.problem;
    return problem.sum_dtype == problem.x_dtype && has_factors_of_x(params) &&
           problem.casting_mode != CastingMode::kNone;
}

/// How xhat becomes out; one loop for each, so that the first two have no branches.
///   kProduct: xhat is rounded to the 16-bit dtype that x and the weight share, then multiplied.
///   The
///       product is exact in float32 and rounded once, which one instruction does for two elements.
///   kSameDtype: xhat is not rounded, weight and bias are in x's dtype.
///   kGeneral: any weight and bias, or none.
enum class OutFormula { kProduct, kSameDtype, kGeneral };

template <class Config>
__device__ __forceinline__ OutFormula out_formula(const NormFwdParams& params,
                                                  const Rounding& rounding) {
    constexpr bool kHasXhat = Config::kXDType == Config::kSumDType;
    if (!Config::kIsUsual && !has_factors_of_x(params)) return OutFormula::kGeneral;
    const bool rounds = kHasXhat && Config::kXDType != DType::kFloat32 && rounding.xhat;
    return rounds && !Config::kLayerNorm ? OutFormula::kProduct : OutFormula::kSameDtype;
}

/// A pack of the weight or the bias, which the L1 holds.
template <DType kDType>
__device__ __forceinline__ uint4 load_pack(const void* array, int column) {
    return *reinterpret_cast<const uint4*>(static_cast<const char*>(array) +
                                           column * size_of(kDType));
}

/// Packs of weight and bias that are requested before the row sums.
template <class Config>
struct EarlyFactors {
    typename Config::FactorTile weight;
    typename Config::FactorTile bias;

    __device__ __forceinline__ EarlyFactors(const NormFwdParams& params, OutFormula formula,
                                            const RowColumns<Config>& columns) {
        if constexpr (Config::kLoadsFactorsEarly) {
            if (!Config::kIsUsual && formula == OutFormula::kGeneral) return;
#pragma unroll
            for (int v = 0; v < Config::kVecs; ++v) {
                const int column = columns.column_inside(v);
                weight[v] = load_pack<Config::kXDType>(params.problem.weight, column);
                if (Config::kLayerNorm) bias[v] = load_pack<Config::kXDType>(params.bias, column);
            }
        }
    }
};

/// Multiplies xhat with the weight and adds the bias, as kGeneral says. Not adding a bias where
/// there is none keeps a value of -0.
template <class Config>
__device__ __forceinline__ void apply_factors(const NormFwdParams& params, const Rounding& rounding,
                                              int column, float* values) {
    float weight[Config::kPack];
    if (!Config::kLayerNorm && rounding.xhat) {
        typename Config::XPack rounded;
        rounded.set(values);
        rounded.get(values);
    }
    load_weight<Config::kPack>(params.problem, column, weight);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) values[i] *= weight[i];
    if (!Config::kLayerNorm || params.bias == nullptr) return;
    float bias[Config::kPack];
    load_as_floats<Config::kPack>(params.bias, params.bias_dtype, column, bias);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) values[i] += bias[i];
}

/// xhat of a pack of the sum, before it is rounded. For 16-bit sums LayerNorm's is rounded once,
/// not twice: what that changes is no more than the rounding of the mean itself.
template <class Config>
__device__ __forceinline__ void normalize(const typename Config::SumPack& sum, float mean,
                                          float rstd, float* values) {
    constexpr bool kRoundsOnce = Config::kLayerNorm && Config::kSumDType != DType::kFloat32;
    const float shift = -mean * rstd;
    sum.get(values);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        if (kRoundsOnce) {
            values[i] = fmaf(values[i], rstd, shift);
        } else {
            values[i] = __fmul_rn(Config::kLayerNorm ? values[i] - mean : values[i], rstd);
        }
    }
}

template <class Config, OutFormula kFormula>
__device__ __forceinline__ void store_out(const NormFwdParams& params, const Rounding& rounding,
                                          const Row& row, const RowColumns<Config>& columns,
                                          const EarlyFactors<Config>& early,
                                          const typename Config::SumTile& sum, float mean,
                                          float rstd) {
    constexpr DType kXDType = Config::kXDType;
    constexpr bool kIsEarly = Config::kLoadsFactorsEarly;
    constexpr bool kHasBranch = kIsEarly || kFormula == OutFormula::kGeneral;
    const int64_t start = row.index * params.problem.hidden_size;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        const bool is_inside = row.is_inside && columns.is_inside(v);
        // Factors that are loaded here must not wait for the pack before behind a branch.
        if (kHasBranch && !is_inside) continue;
        const int column = kHasBranch ? columns.column(v) : columns.column_inside(v);
        const auto factor_words = [&](const uint4* early_words, const void* array) {
            return kIsEarly ? early_words[kIsEarly ? v : 0] : load_pack<kXDType>(array, column);
        };
        typename Config::XPack out;
        float values[Config::kPack];
        normalize<Config>(sum[v], mean, rstd, values);
        if constexpr (kFormula == OutFormula::kProduct) {
            out.set(values);
            out.words[0] = mul_packed<kXDType>(out.words[0],
                                               factor_words(early.weight, params.problem.weight));
        } else if constexpr (kFormula == OutFormula::kSameDtype) {
            float weight[Config::kPack];
            float bias[Config::kPack];
            unpack<kXDType>(factor_words(early.weight, params.problem.weight), weight);
            if (Config::kLayerNorm) {
                unpack<kXDType>(factor_words(early.bias, params.bias), bias);
            }
#pragma unroll
            for (int i = 0; i < Config::kPack; ++i) {
                values[i] = Config::kLayerNorm ? fmaf(values[i], weight[i], bias[i])
                                               : values[i] * weight[i];
            }
            out.set(values);
        } else {
            apply_factors<Config>(params, rounding, column, values);
            out.set(values);
        }
        if (kHasBranch || is_inside) out.store(params.out, start + column);
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, Config::kMinCtas)
    norm_fwd_kernel(const __grid_constant__ NormFwdParams params) {
    __shared__ RowSumStorage<typename Config::Arch> smem;
    const NormProblem& problem = params.problem;
    const Rounding rounding(problem);
    RowReducer<typename Config::Arch> reducer(smem);
    const RowColumns<Config> columns(problem, reducer);
    const Row row(problem, reducer.block());
    const FwdRowPlaces places(params, row.index);
    wait_for_earlier_kernels<typename Config::Arch>();

    // Before the row: what is done with that waits for it.
    const OutFormula formula = out_formula<Config>(params, rounding);
    const EarlyFactors<Config> early(params, formula, columns);
    typename Config::SumTile sum;
    load_sum(params, places, row, columns, sum);
    reducer.wait_for_cluster();

    float mean;
    const float rstd = row_stats(problem, rounding, columns, sum, reducer, mean);
    constexpr bool kHasProduct = !Config::kLayerNorm && Config::kXDType == Config::kSumDType &&
                                 Config::kXDType != DType::kFloat32;
    if (kHasProduct && formula == OutFormula::kProduct) {
        store_out<Config, kHasProduct ? OutFormula::kProduct : OutFormula::kGeneral>(
            params, rounding, row, columns, early, sum, mean, rstd);
    } else if (Config::kIsUsual || formula == OutFormula::kSameDtype) {
        store_out<Config, OutFormula::kSameDtype>(params, rounding, row, columns, early, sum, mean,
                                                  rstd);
    } else {
        store_out<Config, OutFormula::kGeneral>(params, rounding, row, columns, early, sum, mean,
                                                rstd);
    }
    if (row.is_inside && threadIdx.x == 0 && reducer.cluster_rank() == 0) {
        params.rstd[row.index] = rstd;
        if (Config::kLayerNorm) params.mean[row.index] = mean;
    }
}

}  // namespace flash_attn_norm
