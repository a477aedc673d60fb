#include "attention/cpu/work_items.h"

#include <cmath>
#include <cstring>

#include "attention/cpu/half_types.h"

namespace flash_attn_norm {
namespace cpu {

ScoreTerms score_terms(const AttentionProblem& problem, const SeqlenInfo& info, int64_t batch,
                       int64_t head) {
    ScoreTerms terms;
    terms.mask = mask_of(problem, info);
    terms.softmax_scale = problem.softmax_scale;
    terms.softcap = problem.softcap;
    if (problem.alibi_slopes != nullptr) {
        terms.has_alibi = true;
        terms.alibi_slope = problem.alibi_slopes[batch * problem.alibi_batch_stride + head];
    }
    if (problem.attn_bias != nullptr) {
        const BiasStrides& strides = problem.attn_bias_strides;
        const int64_t offset =
            info.batch * strides.batch + head * strides.head + info.row_q * strides.row;
        terms.bias =
            static_cast<const char*>(problem.attn_bias) + offset * size_of(problem.attn_bias_dtype);
        terms.bias_dtype = problem.attn_bias_dtype;
        terms.bias_row_stride = strides.row;
    }
    if (problem.dropout_p > 0.0f) {
        terms.has_dropout = true;
        terms.dropout =
            Dropout::make(problem.rng_state, problem.dropout_p, batch * problem.num_heads_q + head);
        terms.keep_scale = 1.0f / (1.0f - problem.dropout_p);
    }
    return terms;
}

float scale_log2_of(const AttentionProblem& problem) {
    ScoreTerms terms;
    terms.softmax_scale = problem.softmax_scale;
    terms.softcap = problem.softcap;
    terms.has_alibi = problem.alibi_slopes != nullptr;
    terms.bias = problem.attn_bias;
    return terms.scale_log2();
}

float sink_of(const AttentionProblem& problem, int64_t head) {
    if (problem.s_aux == nullptr) return -INFINITY;
    switch (problem.s_aux_dtype) {
        case DType::kFloat32:
            return static_cast<const float*>(problem.s_aux)[head];
        case DType::kBFloat16:
            return bf16_to_float(static_cast<const uint16_t*>(problem.s_aux)[head]);
        case DType::kFloat16:
            return fp16_to_float(static_cast<const uint16_t*>(problem.s_aux)[head]);
    }
    return -INFINITY;
}

namespace {

constexpr double kLn2 = 0.6931471805599453;

/// Its own for the reason of power_of_two.
double natural_logarithm(double x) {
    int exponent = 0;
    const double mantissa = std::frexp(x, &exponent);
    return std::log1p(mantissa - 1.0) + exponent * kLn2;
}

}  // namespace

double power_of_two(double x) {
    if (x < -1100.0) return 0.0;  // below the smallest double
    if (!(x < 1100.0)) return x;  // above the largest; NaN
    const double whole = std::nearbyint(x);
    return std::ldexp(1.0 + std::expm1((x - whole) * kLn2), static_cast<int>(whole));
}

void finish_softmax(const AttentionProblem& problem, int64_t head, int rows, const float* row_max,
                    const float* row_sum, float* factors, float* lse) {
    const double sink_log2 = static_cast<double>(sink_of(problem, head)) / kLn2;
    const double scale_log2 = scale_log2_of(problem);
    for (int r = 0; r < rows; ++r) {
        const double old_max = row_max[r] * scale_log2;
        const double new_max = old_max > sink_log2 ? old_max : sink_log2;
        if (new_max == -INFINITY && row_sum[r] == 0.0f) {  // sees no key; a NaN would stay
            factors[r] = 0.0f;
            lse[r] = -INFINITY;
            continue;
        }
        const double correction = power_of_two(old_max - new_max);
        const double sum = row_sum[r] * correction + power_of_two(sink_log2 - new_max);
        factors[r] = static_cast<float>(correction / sum);
        lse[r] = static_cast<float>(new_max * kLn2 + natural_logarithm(sum));
    }
}

void clear_uncovered_rows(const int32_t* cu_seqlens, int64_t batch_size, int64_t total,
                          int64_t row_bytes, void* data) {
    int64_t covered = 0;
    const auto clear = [&](int64_t begin, int64_t end) {
        if (begin >= end) return;
        std::memset(static_cast<char*>(data) + begin * row_bytes, 0,
                    static_cast<size_t>((end - begin) * row_bytes));
    };
    for (int64_t batch = 0; batch < batch_size; ++batch) {
        const RowRange rows = packed_rows(cu_seqlens, batch, total);
        clear(covered, rows.begin);
        covered = max_of(covered, rows.end);
    }
    clear(covered, total);
}

void write_uncovered_results(const AttentionProblem& problem, void* out, float* softmax_lse) {
    if (!problem.is_packed()) return;
    const int64_t row_bytes =
        int64_t{problem.num_heads_q} * problem.head_dim_v * size_of(problem.dtype);
    clear_uncovered_rows(problem.cu_seqlens_q, problem.batch_size, problem.total_q, row_bytes, out);
    for (int64_t head = 0; head < problem.num_heads_q; ++head) {
        float* lse = softmax_lse + head * problem.total_q;
        int64_t covered = 0;
        for (int64_t batch = 0; batch <= problem.batch_size; ++batch) {
            const bool is_last = batch == problem.batch_size;
            const RowRange rows = is_last
                                      ? RowRange{problem.total_q, problem.total_q}
                                      : packed_rows(problem.cu_seqlens_q, batch, problem.total_q);
            for (int64_t row = covered; row < rows.begin; ++row) lse[row] = -INFINITY;
            covered = max_of(covered, rows.end);
        }
    }
}

}  // namespace cpu
}  // namespace flash_attn_norm
