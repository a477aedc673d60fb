#pragma once

#include <cstdint>

#include "norms/norm_math.cuh"
#include "norms/row_columns.cuh"
#include "ptx/opaque_words.cuh"

// The second half of the forward pass: what is done with a row once its mean and rstd are known.

namespace flash_attn_norm {

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

/// What is known of a usual problem takes no instructions.
template <class Config>
__device__ __forceinline__ Rounding rounding_of(const NormProblem& problem) {
    Rounding rounding(problem);
    if (Config::kIsUsual) rounding.stats = false;
    return rounding;
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

    /// In a loop over rows, so that float16 is converted in each: ahead of the loop, the factors as
    /// floats would take twice the registers.
    __device__ __forceinline__ void keep_packed() {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            ptx::make_opaque(weight[v]);
            if (Config::kLayerNorm) ptx::make_opaque(bias[v]);
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

/// What the sums of a row come to. The mean is 0 for RMSNorm.
struct RowStats {
    float mean;
    float rstd;
};

/// xhat of a pack of the sum, before it is rounded. For 16-bit sums LayerNorm's is rounded once,
/// not twice: what that changes is no more than the rounding of the mean itself.
template <class Config>
__device__ __forceinline__ void normalize(const typename Config::SumPack& sum,
                                          const RowStats& stats, float* values) {
    constexpr bool kRoundsOnce = Config::kLayerNorm && Config::kSumDType != DType::kFloat32;
    const float shift = -stats.mean * stats.rstd;
    sum.get(values);
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        if (kRoundsOnce) {
            values[i] = fmaf(values[i], stats.rstd, shift);
        } else {
            values[i] =
                __fmul_rn(Config::kLayerNorm ? values[i] - stats.mean : values[i], stats.rstd);
        }
    }
}

/// get_sum(v): pack v of what is normed.
template <OutFormula kFormula, class Config, class AnyRow, class GetSum>
__device__ __forceinline__ void store_out(const NormFwdParams& params, const Rounding& rounding,
                                          const AnyRow& row, const RowColumns<Config>& columns,
                                          const EarlyFactors<Config>& early, const GetSum& get_sum,
                                          const RowStats& stats) {
    constexpr DType kXDType = Config::kXDType;
    constexpr bool kIsEarly = Config::kLoadsFactorsEarly;
    constexpr bool kHasBranch = kIsEarly || kFormula == OutFormula::kGeneral;
    const int64_t start = row.start(params.problem);
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
        normalize<Config>(get_sum(v), stats, values);
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

/// The row's output, mean and rstd.
template <class Config, class AnyRow, class GetSum>
__device__ __forceinline__ void store_row(const NormFwdParams& params, const Rounding& rounding,
                                          OutFormula formula, const AnyRow& row,
                                          const RowColumns<Config>& columns,
                                          const EarlyFactors<Config>& early, const GetSum& get_sum,
                                          const RowStats& stats) {
    constexpr bool kHasProduct = !Config::kLayerNorm && Config::kXDType == Config::kSumDType &&
                                 Config::kXDType != DType::kFloat32;
    constexpr OutFormula kSameDtype = OutFormula::kSameDtype;
    if (kHasProduct && formula == OutFormula::kProduct) {
        store_out<kHasProduct ? OutFormula::kProduct : kSameDtype>(params, rounding, row, columns,
                                                                   early, get_sum, stats);
    } else if (Config::kIsUsual || formula == kSameDtype) {
        store_out<kSameDtype>(params, rounding, row, columns, early, get_sum, stats);
    } else {
        store_out<OutFormula::kGeneral>(params, rounding, row, columns, early, get_sum, stats);
    }
    if (!row.is_inside || columns.first != 0) return;  // one thread of a row
    params.rstd[row.index] = stats.rstd;
    if (Config::kLayerNorm) params.mean[row.index] = stats.mean;
}

}  // namespace flash_attn_norm
