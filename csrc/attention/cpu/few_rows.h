#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// Products of a single row with rows that lie as the user's tensor has them. A block that is
/// multiplied once or twice is not worth packing.
template <class SimdType>
struct FloatRow {
    using Simd = SimdType;
    static typename Simd::Vec load(const void* row, int col) {
        return Simd::load(static_cast<const float*>(row) + col);
    }
    static float element(const void* row, int col) { return static_cast<const float*>(row)[col]; }
};

template <class SimdType>
struct Bf16Row {
    using Simd = SimdType;
    static typename Simd::Vec load(const void* row, int col) {
        return Simd::load_bf16(static_cast<const uint16_t*>(row) + col);
    }
    static float element(const void* row, int col) {
        return bf16_to_float(static_cast<const uint16_t*>(row)[col]);
    }
};

template <class SimdType>
struct Fp16Row {
    using Simd = SimdType;
    static typename Simd::Vec load(const void* row, int col) {
        return Simd::load_fp16(static_cast<const uint16_t*>(row) + col);
    }
    static float element(const void* row, int col) {
        return fp16_to_float(static_cast<const uint16_t*>(row)[col]);
    }
};

template <class Row>
void dot_keys_of(const float* q, const TensorRows& keys, float* scores) {
    using Simd = typename Row::Simd;
    constexpr int kWidth = Simd::kWidth;
    for (int r = 0; r < keys.rows; ++r) {
        const void* key = row_address(keys, r);
        auto sum0 = Simd::broadcast(0.0f);
        auto sum1 = sum0;
        int col = 0;
        for (; col + 2 * kWidth <= keys.cols; col += 2 * kWidth) {
            sum0 = Simd::fma(Simd::load(q + col), Row::load(key, col), sum0);
            sum1 = Simd::fma(Simd::load(q + col + kWidth), Row::load(key, col + kWidth), sum1);
        }
        float sum = Simd::reduce_add(Simd::add(sum0, sum1));
        for (; col < keys.cols; ++col) sum += q[col] * Row::element(key, col);
        scores[r] = sum;
    }
}

/// acc[kVecs vectors] += sum over the rows of weights[r] * values[r], all sums in registers.
template <class Row, int kVecs>
void add_columns_of(const TensorRows& values, const float* weights, int col, float* acc) {
    using Simd = typename Row::Simd;
    typename Simd::Vec sum[kVecs];
    for (int v = 0; v < kVecs; ++v) sum[v] = Simd::load(acc + col + v * Simd::kWidth);
    for (int r = 0; r < values.rows; ++r) {
        const void* value = row_address(values, r);
        const auto weight = Simd::broadcast(weights[r]);
        for (int v = 0; v < kVecs; ++v) {
            sum[v] = Simd::fma(weight, Row::load(value, col + v * Simd::kWidth), sum[v]);
        }
    }
    for (int v = 0; v < kVecs; ++v) Simd::store(acc + col + v * Simd::kWidth, sum[v]);
}

template <class Row>
void add_values_of(const TensorRows& values, const float* weights, float* acc) {
    constexpr int kWidth = Row::Simd::kWidth, kVecs = 8;
    int col = 0;
    for (; col + kVecs * kWidth <= values.cols; col += kVecs * kWidth) {
        add_columns_of<Row, kVecs>(values, weights, col, acc);
    }
    for (; col + kWidth <= values.cols; col += kWidth) {
        add_columns_of<Row, 1>(values, weights, col, acc);
    }
    for (; col < values.cols; ++col) {
        float sum = acc[col];
        for (int r = 0; r < values.rows; ++r) {
            sum += weights[r] * Row::element(row_address(values, r), col);
        }
        acc[col] = sum;
    }
}

inline float operand_as_float(float operand) {
    return operand;
}
inline float operand_as_float(uint16_t operand) {
    return bf16_to_float(operand);
}

template <class Simd>
void dot_keys(const TensorRows& q, const TensorRows& keys, float* scores) {
    alignas(64) float row[kMaxHeadDim];
    const int cols_padded = static_cast<int>(round_up(q.cols, kPanel));
    load_row_as_float<Simd>(q.data, q.dtype, q.cols, cols_padded, row);
    if (keys.dtype == DType::kFloat32) return dot_keys_of<FloatRow<Simd>>(row, keys, scores);
    if (keys.dtype == DType::kBFloat16) return dot_keys_of<Bf16Row<Simd>>(row, keys, scores);
    dot_keys_of<Fp16Row<Simd>>(row, keys, scores);
}

template <class Operand>
void add_values(const TensorRows& values, const void* probs, float* acc) {
    using Simd = typename Operand::Simd;
    alignas(64) float weights[kMaxBlockN];
    const auto* operands = static_cast<const typename Operand::Type*>(probs);
    for (int r = 0; r < values.rows; ++r) weights[r] = operand_as_float(operands[r]);
    if (values.dtype == DType::kFloat32) return add_values_of<FloatRow<Simd>>(values, weights, acc);
    if (values.dtype == DType::kBFloat16) return add_values_of<Bf16Row<Simd>>(values, weights, acc);
    add_values_of<Fp16Row<Simd>>(values, weights, acc);
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
