// The row kernels of both passes, written in Simd. Included once for each instruction set, inside
// its namespace and after its Simd.

using Vector = Simd::Vector;

/// A whole vector of columns, or the first `count` columns of one at the end of a row.
struct Whole {};
struct Part {
    int count;
};

template <class Element>
Vector load(const Element* source, Whole) {
    return Simd::load(source);
}

template <class Element>
Vector load(const Element* source, Part part) {
    Element lanes[Simd::kWidth] = {};
    for (int i = 0; i < part.count; ++i) lanes[i] = source[i];
    return Simd::load(lanes);
}

template <class Element>
void store(Element* target, Vector a, Whole) {
    Simd::store(target, a);
}

template <class Element>
void store(Element* target, Vector a, Part part) {
    Element lanes[Simd::kWidth];
    Simd::store(lanes, a);
    for (int i = 0; i < part.count; ++i) target[i] = lanes[i];
}

/// Zero in the lanes that lie past the end of the row, whatever was computed there.
inline Vector keep(Vector a, Whole) {
    return a;
}

inline Vector keep(Vector a, Part part) {
    float lanes[Simd::kWidth];
    Simd::store(lanes, a);
    for (int i = part.count; i < Simd::kWidth; ++i) lanes[i] = 0.0f;
    return Simd::load(lanes);
}

/// Asks for what the next row will read. It comes from memory while this row, which the L1 holds by
/// now, is finished; the hardware's own prefetching stops at the end of each row's first pass.
template <class Element>
void prefetch(const Element* source) {
    __builtin_prefetch(source);
}

// The loops over columns are inlined, and what they call holds its pointers by value: through a
// reference each vector would load them again, since a store might have changed them.

/// fn(column, Whole{} or Part) over a row.
template <class Fn>
__attribute__((always_inline)) inline void for_columns(int64_t hidden_size, Fn fn) {
    int64_t column = 0;
    for (; column + Simd::kWidth <= hidden_size; column += Simd::kWidth) fn(column, Whole{});
    if (column < hidden_size) fn(column, Part{static_cast<int>(hidden_size - column)});
}

/// Sums over the columns of the kSums terms that fn(column, span, terms) sets. Several vectors of
/// each sum are in flight, to hide the latency of the additions.
template <int kSums, int kChains, class Fn>
__attribute__((always_inline)) inline void sum_columns(int64_t hidden_size, float (&sums)[kSums],
                                                       Fn fn) {
    static_assert(kChains == 2 || kChains == 4, "the last sum adds up pairs");
    Vector partial[kChains][kSums];
    for (int chain = 0; chain < kChains; ++chain) {
        for (int i = 0; i < kSums; ++i) partial[chain][i] = Simd::set(0.0f);
    }
    int64_t column = 0;
    Vector terms[kSums];
    for (; column + kChains * Simd::kWidth <= hidden_size; column += kChains * Simd::kWidth) {
        for (int chain = 0; chain < kChains; ++chain) {
            fn(column + chain * Simd::kWidth, Whole{}, terms);
            for (int i = 0; i < kSums; ++i) {
                partial[chain][i] = Simd::add(partial[chain][i], terms[i]);
            }
        }
    }
    for (; column + Simd::kWidth <= hidden_size; column += Simd::kWidth) {
        fn(column, Whole{}, terms);
        for (int i = 0; i < kSums; ++i) partial[0][i] = Simd::add(partial[0][i], terms[i]);
    }
    if (column < hidden_size) {
        const Part part{static_cast<int>(hidden_size - column)};
        fn(column, part, terms);
        for (int i = 0; i < kSums; ++i) {
            partial[1][i] = Simd::add(partial[1][i], keep(terms[i], part));
        }
    }
    for (int i = 0; i < kSums; ++i) {
        Vector total = Simd::add(partial[0][i], partial[1][i]);
        if (kChains == 4) {
            total = Simd::add(total, Simd::add(partial[kChains - 2][i], partial[kChains - 1][i]));
        }
        sums[i] = Simd::sum(total);
    }
}

/// (sum - mean) * rstd, rounded if the casting mode says so.
template <class Sum, bool kRoundXhat>
Vector normalize(Vector sum, Vector mean, Vector rstd) {
    const Vector xhat = Simd::mul(Simd::sub(sum, mean), rstd);
    return kRoundXhat ? Simd::round_to<Sum>(xhat) : xhat;
}

/// One row of a tensor, for tensors that may be absent.
template <class Element>
Element* row_of(const void* base, const RowShape& shape, const RowStrides& strides, int64_t row) {
    if (base == nullptr) return nullptr;
    return static_cast<Element*>(const_cast<void*>(base)) + row_offset(shape, strides, row);
}

template <class Element>
Element* contiguous_row_of(void* base, int64_t hidden_size, int64_t row) {
    return base == nullptr ? nullptr : static_cast<Element*>(base) + row * hidden_size;
}

// ---- forward ----

struct RowStats {
    float mean = 0.0f;
    float rstd = 0.0f;
};

template <class Sum, class LoadSum>
__attribute__((always_inline)) inline RowStats rms_stats(const NormProblem& problem,
                                                         LoadSum load_sum) {
    const bool rounds_all = problem.casting_mode == CastingMode::kNone;
    float squares[1];
    sum_columns<1, 4>(problem.hidden_size, squares,
                      [=](int64_t column, auto span, Vector(&terms)[1]) {
                          const Vector sum = load_sum(column, span);
                          const Vector square = Simd::mul(sum, sum);
                          terms[0] = rounds_all ? Simd::round_to<Sum>(square) : square;
                      });
    RowStats stats;
    const float mean_square = squares[0] / static_cast<float>(problem.hidden_size);
    if (rounds_all) {
        const float variance = rounded_to<Sum>(rounded_to<Sum>(mean_square) + problem.eps);
        stats.rstd = rounded_to<Sum>(1.0f / std::sqrt(variance));
    } else {
        stats.rstd = 1.0f / std::sqrt(mean_square + problem.eps);
    }
    return stats;
}

/// Two passes: the squares of deviations, never squares minus a squared mean, which cancel when
/// the mean is large.
template <class LoadSum>
__attribute__((always_inline)) inline RowStats layer_stats(const NormProblem& problem,
                                                           LoadSum load_sum) {
    const float size = static_cast<float>(problem.hidden_size);
    float total[1];
    sum_columns<1, 4>(
        problem.hidden_size, total,
        [=](int64_t column, auto span, Vector(&terms)[1]) { terms[0] = load_sum(column, span); });
    RowStats stats;
    stats.mean = total[0] / size;
    const Vector mean = Simd::set(stats.mean);
    float squares[1];
    sum_columns<1, 4>(problem.hidden_size, squares,
                      [=](int64_t column, auto span, Vector(&terms)[1]) {
                          const Vector deviation = Simd::sub(load_sum(column, span), mean);
                          terms[0] = Simd::mul(deviation, deviation);
                      });
    stats.rstd = 1.0f / std::sqrt(squares[0] / size + problem.eps);
    return stats;
}

template <class X, class Residual, class Sum, bool kRoundXhat>
void norm_fwd_rows(const NormFwdParams& params, const float* weight, const float* bias,
                   int64_t row_begin, int64_t row_end) {
    const NormProblem& problem = params.problem;
    const auto x_row = [&](int64_t row) {
        return row_of<const X>(params.x, problem.rows, params.x_strides, row);
    };
    const auto residual_row = [&](int64_t row) {
        return row_of<const Residual>(params.residual, problem.rows, params.residual_strides, row);
    };
    for (int64_t row = row_begin; row < row_end; ++row) {
        const X* x = x_row(row);
        const Residual* residual = residual_row(row);
        const int64_t next_row = row + 1 < row_end ? row + 1 : row;
        const X* next_x = x_row(next_row);
        const Residual* next_residual = residual_row(next_row);
        Sum* residual_out = contiguous_row_of<Sum>(params.residual_out, problem.hidden_size, row);
        X* out = contiguous_row_of<X>(params.out, problem.hidden_size, row);
        const auto load_sum = [=](int64_t column, auto span) {
            const Vector sum = load(x + column, span);
            if (residual == nullptr) return sum;
            return Simd::round_to<Sum>(Simd::add(sum, load(residual + column, span)));
        };

        const RowStats stats = problem.is_layer_norm ? layer_stats(problem, load_sum)
                                                     : rms_stats<Sum>(problem, load_sum);
        const Vector mean = Simd::set(stats.mean);
        const Vector rstd = Simd::set(stats.rstd);
        for_columns(problem.hidden_size, [=](int64_t column, auto span) {
            prefetch(next_x + column);
            if (residual != nullptr) prefetch(next_residual + column);
            const Vector sum = load_sum(column, span);
            if (residual_out != nullptr) store(residual_out + column, sum, span);
            const Vector xhat = normalize<Sum, kRoundXhat>(sum, mean, rstd);
            const Vector scaled = Simd::mul(xhat, load(weight + column, span));
            store(out + column, Simd::add(scaled, load(bias + column, span)), span);
        });
        params.rstd[row] = stats.rstd;
        if (params.mean != nullptr) params.mean[row] = stats.mean;
    }
}

template <class X, class Residual, class Sum>
void dispatch_fwd_rounding(const NormFwdParams& params, const float* weight, const float* bias,
                           int64_t row_begin, int64_t row_end) {
    if (params.problem.casting_mode == CastingMode::kGemma) {
        norm_fwd_rows<X, Residual, Sum, false>(params, weight, bias, row_begin, row_end);
    } else {
        norm_fwd_rows<X, Residual, Sum, true>(params, weight, bias, row_begin, row_end);
    }
}

template <class X>
void dispatch_fwd_dtypes(const NormFwdParams& params, const float* weight, const float* bias,
                         int64_t row_begin, int64_t row_end) {
    if (params.problem.sum_dtype == params.problem.x_dtype) {
        dispatch_fwd_rounding<X, X, X>(params, weight, bias, row_begin, row_end);
    } else if (params.residual_dtype == params.problem.x_dtype) {
        dispatch_fwd_rounding<X, X, float>(params, weight, bias, row_begin, row_end);
    } else {
        dispatch_fwd_rounding<X, float, float>(params, weight, bias, row_begin, row_end);
    }
}

inline void norm_fwd(const NormFwdParams& params, const float* weight, const float* bias,
                     int64_t row_begin, int64_t row_end) {
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            return dispatch_fwd_dtypes<float>(params, weight, bias, row_begin, row_end);
        case DType::kBFloat16:
            return dispatch_fwd_dtypes<BFloat16>(params, weight, bias, row_begin, row_end);
        case DType::kFloat16:
            return dispatch_fwd_dtypes<Float16>(params, weight, bias, row_begin, row_end);
    }
}

// ---- backward ----

/// What the backward pass reads and writes of one row.
template <class X, class Sum>
struct BwdRow {
    const Sum* sum;
    const X* dout;
    const Sum* dresidual_out;  // null: none
    X* dx;
    float* dresidual;  // null: not wanted
    float mean, rstd;

    BwdRow(const NormBwdParams& params, int64_t row)
        : sum(row_of<const Sum>(params.sum, params.problem.rows, params.sum_strides, row)),
          dout(row_of<const X>(params.dout, params.problem.rows, params.dout_strides, row)),
          dresidual_out(row_of<const Sum>(params.dresidual_out, params.problem.rows,
                                          params.dresidual_out_strides, row)),
          dx(contiguous_row_of<X>(params.dx, params.problem.hidden_size, row)),
          dresidual(contiguous_row_of<float>(params.dresidual, params.problem.hidden_size, row)),
          mean(params.problem.is_layer_norm ? params.mean[row] : 0.0f),
          rstd(params.rstd[row]) {}

    template <class Span>
    Vector xhat(int64_t column, Span span) const {
        return normalize<Sum, false>(load(sum + column, span), Simd::set(mean), Simd::set(rstd));
    }
};

/// kRows rows: the weight is loaded, and each sum for dweight and dbias loaded and stored, once for
/// all of them.
///     dx = rstd * (dxhat - xhat * mean(dxhat * xhat) - mean(dxhat)) + dresidual_out
/// with dxhat = dout * weight, and the mean of dxhat for LayerNorm alone.
template <class X, class Sum, bool kLayerNorm, bool kRoundXhat, int kRows>
void norm_bwd_block(const NormBwdParams& params, const float* weight, int64_t first_row,
                    float* dweight, float* dbias) {
    constexpr int kSums = kLayerNorm ? 2 : 1;
    constexpr int kLast = kRows - 1;
    const int64_t hidden_size = params.problem.hidden_size;
    // Two names, not an array: the compiler keeps them in registers.
    const BwdRow<X, Sum> first(params, first_row);
    const BwdRow<X, Sum> last(params, first_row + kLast);

    float sums[kRows * kSums];
    sum_columns<kRows * kSums, 2>(
        hidden_size, sums, [&](int64_t column, auto span, Vector(&terms)[kRows* kSums]) {
            const Vector factor = load(weight + column, span);
            const auto set_terms = [&](const BwdRow<X, Sum>& row, int index) {
                const Vector dxhat = Simd::mul(load(row.dout + column, span), factor);
                terms[index * kSums] = Simd::mul(dxhat, row.xhat(column, span));
                if (kLayerNorm) terms[index * kSums + kSums - 1] = dxhat;
            };
            set_terms(first, 0);
            if (kRows > 1) set_terms(last, kLast);
        });
    const auto minus_mean = [&](int index) {
        return Simd::set(-sums[index] / static_cast<float>(hidden_size));
    };
    const Vector first_projection = minus_mean(0);
    const Vector last_projection = minus_mean(kLast * kSums);
    const Vector first_offset = minus_mean(kSums - 1);
    const Vector last_offset = minus_mean(kLast * kSums + kSums - 1);

    for_columns(hidden_size, [&](int64_t column, auto span) {
        const Vector factor = load(weight + column, span);
        Vector dweight_part = Simd::set(0.0f);
        Vector dbias_part = Simd::set(0.0f);
        if (dweight != nullptr) dweight_part = load(dweight + column, span);
        if (dbias != nullptr) dbias_part = load(dbias + column, span);
        const auto finish = [&](const BwdRow<X, Sum>& row, Vector projection, Vector offset) {
            const Vector dout = load(row.dout + column, span);
            const Vector xhat = row.xhat(column, span);
            Vector dsum = Simd::mul(dout, factor);
            dsum = Simd::mul_add(xhat, projection, dsum);
            if (kLayerNorm) dsum = Simd::add(dsum, offset);
            dsum = Simd::mul(dsum, Simd::set(row.rstd));
            if (row.dresidual_out != nullptr) {
                dsum = Simd::add(dsum, load(row.dresidual_out + column, span));
            }
            store(row.dx + column, dsum, span);
            if (row.dresidual != nullptr) store(row.dresidual + column, dsum, span);
            // The forward pass multiplied the weight by xhat as rounded there.
            const Vector rounded = kRoundXhat ? Simd::round_to<Sum>(xhat) : xhat;
            dweight_part = Simd::mul_add(dout, rounded, dweight_part);
            dbias_part = Simd::add(dbias_part, dout);
        };
        finish(first, first_projection, first_offset);
        if (kRows > 1) finish(last, last_projection, last_offset);
        if (dweight != nullptr) store(dweight + column, dweight_part, span);
        if (dbias != nullptr) store(dbias + column, dbias_part, span);
    });
}

template <class X, class Sum, bool kLayerNorm, bool kRoundXhat>
void norm_bwd_rows(const NormBwdParams& params, const float* weight, int64_t row_begin,
                   int64_t row_end, float* dweight, float* dbias) {
    // Short rows' sums for dweight and dbias are in the L1 anyway.
    constexpr int64_t kLongRow = 1024;
    int64_t row = row_begin;
    for (; params.problem.hidden_size >= kLongRow && row + 2 <= row_end; row += 2) {
        norm_bwd_block<X, Sum, kLayerNorm, kRoundXhat, 2>(params, weight, row, dweight, dbias);
    }
    for (; row < row_end; ++row) {
        norm_bwd_block<X, Sum, kLayerNorm, kRoundXhat, 1>(params, weight, row, dweight, dbias);
    }
}

template <class X, class Sum>
void dispatch_bwd_mode(const NormBwdParams& params, const float* weight, int64_t row_begin,
                       int64_t row_end, float* dweight, float* dbias) {
    if (params.problem.is_layer_norm) {
        norm_bwd_rows<X, Sum, true, false>(params, weight, row_begin, row_end, dweight, dbias);
    } else if (params.problem.casting_mode == CastingMode::kGemma) {
        norm_bwd_rows<X, Sum, false, false>(params, weight, row_begin, row_end, dweight, dbias);
    } else {
        norm_bwd_rows<X, Sum, false, true>(params, weight, row_begin, row_end, dweight, dbias);
    }
}

template <class X>
void dispatch_bwd_dtypes(const NormBwdParams& params, const float* weight, int64_t row_begin,
                         int64_t row_end, float* dweight, float* dbias) {
    if (params.problem.sum_dtype == params.problem.x_dtype) {
        dispatch_bwd_mode<X, X>(params, weight, row_begin, row_end, dweight, dbias);
    } else {
        dispatch_bwd_mode<X, float>(params, weight, row_begin, row_end, dweight, dbias);
    }
}

inline void norm_bwd(const NormBwdParams& params, const float* weight, int64_t row_begin,
                     int64_t row_end, float* dweight, float* dbias) {
    switch (params.problem.x_dtype) {
        case DType::kFloat32:
            return dispatch_bwd_dtypes<float>(params, weight, row_begin, row_end, dweight, dbias);
        case DType::kBFloat16:
            return dispatch_bwd_dtypes<BFloat16>(params, weight, row_begin, row_end, dweight,
                                                 dbias);
        case DType::kFloat16:
            return dispatch_bwd_dtypes<Float16>(params, weight, row_begin, row_end, dweight, dbias);
    }
}

extern const RowKernels kRowKernels;
const RowKernels kRowKernels = {&norm_fwd, &norm_bwd};
