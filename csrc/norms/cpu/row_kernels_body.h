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

/// fn(column, Whole{} or Part) over a row.
template <class Fn>
void for_columns(int64_t hidden_size, Fn&& fn) {
    int64_t column = 0;
    for (; column + Simd::kWidth <= hidden_size; column += Simd::kWidth) fn(column, Whole{});
    if (column < hidden_size) fn(column, Part{static_cast<int>(hidden_size - column)});
}

/// Sums over a row of the kSums terms that fn(column, span, terms) sets. Several vectors of each
/// sum are in flight, to hide the latency of the additions.
template <int kSums, class Fn>
void sum_columns(int64_t hidden_size, float (&sums)[kSums], Fn&& fn) {
    constexpr int kChains = 4;
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
        sums[i] = Simd::sum(Simd::add(Simd::add(partial[0][i], partial[1][i]),
                                      Simd::add(partial[2][i], partial[3][i])));
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
RowStats rms_stats(const NormProblem& problem, LoadSum&& load_sum) {
    const bool rounds_all = problem.casting_mode == CastingMode::kNone;
    float squares[1];
    sum_columns<1>(problem.hidden_size, squares, [&](int64_t column, auto span, Vector(&terms)[1]) {
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
RowStats layer_stats(const NormProblem& problem, LoadSum&& load_sum) {
    const float size = static_cast<float>(problem.hidden_size);
    float total[1];
    sum_columns<1>(problem.hidden_size, total, [&](int64_t column, auto span, Vector(&terms)[1]) {
        terms[0] = load_sum(column, span);
    });
    RowStats stats;
    stats.mean = total[0] / size;
    const Vector mean = Simd::set(stats.mean);
    float squares[1];
    sum_columns<1>(problem.hidden_size, squares, [&](int64_t column, auto span, Vector(&terms)[1]) {
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
    for (int64_t row = row_begin; row < row_end; ++row) {
        const X* x = row_of<const X>(params.x, problem.rows, params.x_strides, row);
        const Residual* residual =
            row_of<const Residual>(params.residual, problem.rows, params.residual_strides, row);
        Sum* residual_out = contiguous_row_of<Sum>(params.residual_out, problem.hidden_size, row);
        X* out = contiguous_row_of<X>(params.out, problem.hidden_size, row);
        const auto load_sum = [&](int64_t column, auto span) {
            const Vector sum = load(x + column, span);
            if (residual == nullptr) return sum;
            return Simd::round_to<Sum>(Simd::add(sum, load(residual + column, span)));
        };

        const RowStats stats = problem.is_layer_norm ? layer_stats(problem, load_sum)
                                                     : rms_stats<Sum>(problem, load_sum);
        const Vector mean = Simd::set(stats.mean);
        const Vector rstd = Simd::set(stats.rstd);
        for_columns(problem.hidden_size, [&](int64_t column, auto span) {
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

template <class X, class Sum, bool kLayerNorm, bool kRoundXhat>
void norm_bwd_rows(const NormBwdParams& params, const float* weight, int64_t row_begin,
                   int64_t row_end, float* dweight, float* dbias) {
    const NormProblem& problem = params.problem;
    const float size = static_cast<float>(problem.hidden_size);
    for (int64_t row = row_begin; row < row_end; ++row) {
        const Sum* sum = row_of<const Sum>(params.sum, problem.rows, params.sum_strides, row);
        const X* dout = row_of<const X>(params.dout, problem.rows, params.dout_strides, row);
        const Sum* dresidual_out = row_of<const Sum>(params.dresidual_out, problem.rows,
                                                     params.dresidual_out_strides, row);
        X* dx = contiguous_row_of<X>(params.dx, problem.hidden_size, row);
        float* dresidual = contiguous_row_of<float>(params.dresidual, problem.hidden_size, row);
        const Vector mean = Simd::set(kLayerNorm ? params.mean[row] : 0.0f);
        const Vector rstd = Simd::set(params.rstd[row]);

        // With dxhat = dout * weight:  dx = rstd * (dxhat - xhat * mean(dxhat * xhat) -
        // mean(dxhat))
        float sums[2] = {0.0f, 0.0f};
        sum_columns<2>(
            problem.hidden_size, sums, [&](int64_t column, auto span, Vector(&terms)[2]) {
                const Vector dxhat =
                    Simd::mul(load(dout + column, span), load(weight + column, span));
                const Vector xhat = normalize<Sum, false>(load(sum + column, span), mean, rstd);
                terms[0] = Simd::mul(dxhat, xhat);
                terms[1] = kLayerNorm ? dxhat : Simd::set(0.0f);
            });
        const Vector projection = Simd::set(-sums[0] / size);
        const Vector offset = Simd::set(-sums[1] / size);
        for_columns(problem.hidden_size, [&](int64_t column, auto span) {
            const Vector dout_part = load(dout + column, span);
            const Vector xhat = normalize<Sum, false>(load(sum + column, span), mean, rstd);
            Vector dsum = Simd::mul(dout_part, load(weight + column, span));
            dsum = Simd::mul_add(xhat, projection, dsum);
            if (kLayerNorm) dsum = Simd::add(dsum, offset);
            dsum = Simd::mul(dsum, rstd);
            if (dresidual_out != nullptr) {
                dsum = Simd::add(dsum, load(dresidual_out + column, span));
            }
            store(dx + column, dsum, span);
            if (dresidual != nullptr) store(dresidual + column, dsum, span);
            if (dweight != nullptr) {
                // The forward pass multiplied the weight by xhat as rounded there.
                const Vector factor = kRoundXhat ? Simd::round_to<Sum>(xhat) : xhat;
                store(dweight + column,
                      Simd::mul_add(dout_part, factor, load(dweight + column, span)), span);
            }
            if (dbias != nullptr) {
                store(dbias + column, Simd::add(dout_part, load(dbias + column, span)), span);
            }
        });
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
