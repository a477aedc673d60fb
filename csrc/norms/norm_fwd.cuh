#pragma once

#include <cstdint>
#include <type_traits>

#include "norms/norm_fwd_out.cuh"
#include "norms/norm_math.cuh"
#include "norms/row_columns.cuh"
#include "norms/row_sums.cuh"
#include "ptx/cached_load.cuh"

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
    static constexpr bool kReadsTwice = false;
    static constexpr bool kIsEven = false;  // see RowColumns

    using XPack = PackWords<kPack, kXDType>;
    /// A pack of the sum, as it lies in memory: in registers it takes half the room of floats.
    using SumPack = PackWords<kPack, kSumDType>;
    using SumTile = SumPack[kVecs];
    using FactorTile = uint4[kLoadsFactorsEarly ? kVecs : 1];
};

/// Rows without a residual that are read twice, the second time from the L1: no registers hold them
/// while the sums come together, so that more CTAs share a multiprocessor. In LayerNorm, whose
/// instructions count, only for rows of which every thread has as many packs.
template <DType kXDType_, bool kLayerNorm_, int kVecs_, class Arch_>
struct FwdTwiceConfig : FwdConfig<kXDType_, kLayerNorm_, FwdKind::kUsual, kVecs_, Arch_> {
    static constexpr int kMinCtas = 3;
    static constexpr bool kReadsTwice = true;
    static constexpr bool kIsEven = kLayerNorm_;
    static constexpr bool kLoadsFactorsEarly = false;
    using FactorTile = uint4[1];
};

/// LayerNorm's short rows of which every thread has as many packs, without a residual: no
/// instruction for anything else.
template <DType kXDType_, int kVecs_, class Arch_>
struct FwdShortConfig : FwdConfig<kXDType_, true, FwdKind::kUsual, kVecs_, Arch_> {
    static constexpr int kMinCtas = kVecs_ == 2 ? 3 : 2;
    static constexpr bool kIsEven = true;
    static constexpr bool kLoadsFactorsEarly = false;
    using FactorTile = uint4[1];
};

/// Few rows whose sums are added up as FwdTwiceConfig's: a single row waits for nothing but what it
/// needs, and there are registers for that.
template <DType kXDType_, bool kLayerNorm_, int kVecs_, class Arch_>
struct FwdFewConfig : FwdConfig<kXDType_, kLayerNorm_, FwdKind::kUsual, kVecs_, Arch_> {
    static constexpr int kMinCtas = 1;
    static constexpr bool kLoadsFactorsEarly = true;
    using FactorTile = uint4[kVecs_];
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

/// A pack of a row; zeros outside it. What is read leaves the L2 after what is written, which makes
/// reads and writes disturb each other less.
template <int kCount, DType kDType>
__device__ __forceinline__ void load_pack_once(const char* row_start, int column, bool is_inside,
                                               PackWords<kCount, kDType>& pack) {
    const char* address = row_start + static_cast<int64_t>(column) * size_of(kDType);
#pragma unroll
    for (int i = 0; i < PackWords<kCount, kDType>::kWords; ++i) {
        pack.words[i] = ptx::ld_global_if(address + 16 * i, is_inside, ptx::l2_evict_last());
    }
}

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
            load_pack_once(residual_row, columns.column(first + i),
                           row.is_inside && columns.is_inside(first + i), residual[i]);
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
        load_pack_once(places.x, columns.column(v), row.is_inside && columns.is_inside(v), x[v]);
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
    const int64_t out_start = row.start(problem);
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (columns.is_inside(v)) sum[v].store(params.residual_out, out_start + columns.column(v));
    }
}

/// x, for a kernel that reads it twice; zeros outside the row.
template <class Config>
__device__ __forceinline__ void load_first(const char* row_start, const RowColumns<Config>& columns,
                                           typename Config::SumTile& x) {
    const uint64_t policy = ptx::l2_evict_last();
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        // Without a branch, behind which the next load would wait for this one.
        x[v].words[0] = ptx::ld_global_evict_last(
            row_start + columns.column_inside(v) * size_of(Config::kXDType), policy);
    }
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        if (!columns.is_inside(v)) x[v].words[0] = make_uint4(0, 0, 0, 0);
    }
}

/// The squares of a pack, each rounded to x's dtype or not.
template <class Config, bool kRounds>
__device__ __forceinline__ float pack_squares(const typename Config::SumPack& sum) {
    float values[Config::kPack];
    sum.get(values);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        if (kRounds) {
            squares += round_to<Config::kXDType>(__fmul_rn(values[i], values[i]));
        } else {
            squares = fmaf(values[i], values[i], squares);
        }
    }
    return squares;
}

/// A thread's part of the row's squares.
template <class Config, bool kRounds>
__device__ __forceinline__ float sum_of_squares(const typename Config::SumTile& sum) {
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) squares += pack_squares<Config, kRounds>(sum[v]);
    return squares;
}

/// Adds pack v to the moments of those before it. A pack outside the row is zeros, which do not
/// count; those before one inside are inside, too, so that their number is known here.
template <class Config>
__device__ __forceinline__ void add_pack(const typename Config::SumPack& sum, int v, bool is_inside,
                                         RowMoments& moments) {
    constexpr float kCount = Config::kPack;
    float values[Config::kPack];
    sum.get(values);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) total += values[i];
    const float mean = total * (1.0f / kCount);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kPack; ++i) {
        const float distance = values[i] - mean;
        squares = fmaf(distance, distance, squares);
    }
    if (v > 0) {
        const float before = kCount * v;
        const float distance = is_inside ? fmaf(moments.sum, 1.0f / before, -mean) : 0.0f;
        squares = fmaf(distance * (before * kCount / (before + kCount)), distance, squares);
    }
    moments.squares += squares;
    moments.sum += total;
    if (is_inside) moments.count += kCount;
}

/// The moments of a thread's part of the row.
template <class Config>
__device__ __forceinline__ RowMoments part_moments(const RowColumns<Config>& columns,
                                                   const typename Config::SumTile& sum) {
    RowMoments moments;
#pragma unroll
    for (int v = 0; v < Config::kVecs; ++v) {
        add_pack<Config>(sum[v], v, columns.is_inside(v), moments);
    }
    return moments;
}

template <class Config>
__device__ __forceinline__ RowStats row_stats(const NormProblem& problem, const Rounding& rounding,
                                              const RowColumns<Config>& columns,
                                              const typename Config::SumTile& sum,
                                              RowReducer<typename Config::Arch>& reducer) {
    float mean = 0.0f;
    float squares[1];
    if constexpr (Config::kLayerNorm) {
        RowMoments moments = part_moments(columns, sum);
        reducer.send(moments, columns.is_even);
        reducer.sync();
        reducer.receive(moments, problem.inv_hidden_size);
        mean = __fmul_rn(moments.sum, problem.inv_hidden_size);
        squares[0] = moments.squares;
    } else {
        // One branch a row: one for each element would take longer than its arithmetic.
        if (!Config::kIsUsual && rounding.stats) {
            squares[0] = sum_of_squares<Config, true>(sum);
        } else {
            squares[0] = sum_of_squares<Config, false>(sum);
        }
        reducer.sum(squares);
    }
    return {mean, row_rstd<Config::kXDType>(problem, rounding, squares[0])};
}

template <class Config>
__global__ void __launch_bounds__(Config::kMaxThreads, Config::kMinCtas)
    norm_fwd_kernel(const __grid_constant__ NormFwdParams params) {
    __shared__ RowSumStorage<typename Config::Arch> smem;
    const NormProblem& problem = params.problem;
    const Rounding rounding = rounding_of<Config>(problem);
    RowReducer<typename Config::Arch> reducer(smem);
    const RowColumns<Config> columns(problem, reducer);
    const Row row(problem, reducer.block());
    // A kernel that loads without branches reads the first row where there is none.
    constexpr bool kHasNoBranch = Config::kReadsTwice || Config::kIsEven;
    const bool reads_first = kHasNoBranch && !row.is_inside;
    const FwdRowPlaces places(params, reads_first ? 0 : row.index);
    wait_for_earlier_kernels<typename Config::Arch>();

    // Before the row: what is done with that waits for it.
    const OutFormula formula = out_formula<Config>(params, rounding);
    const EarlyFactors<Config> early(params, formula, columns);
    typename Config::SumTile sum;
    if constexpr (Config::kReadsTwice) {
        load_first(places.x, columns, sum);
    } else if constexpr (Config::kIsEven) {
#pragma unroll
        for (int v = 0; v < Config::kVecs; ++v) {
            sum[v].words[0] =
                ptx::ld_global_nc(places.x + columns.column(v) * size_of(Config::kXDType));
        }
    } else {
        load_sum(params, places, row, columns, sum);
    }
    reducer.wait_for_cluster();

    const RowStats stats = row_stats(problem, rounding, columns, sum, reducer);
    const auto get_sum = [&](int v) {
        if constexpr (Config::kReadsTwice) {
            typename Config::SumPack pack;
            pack.words[0] = ptx::ld_global_evict_first(places.x + columns.column_inside(v) *
                                                                      size_of(Config::kXDType));
            return pack;
        } else {
            return sum[v];
        }
    };
    store_row(params, rounding, formula, row, columns, early, get_sum, stats);
}

}  // namespace flash_attn_norm
