#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// One element row of a user's tensor as floats; dst is padded with zeros to cols_padded.
template <class Simd>
void load_row_as_float(const void* row, DType dtype, int cols, int cols_padded, float* dst) {
    constexpr int kWidth = Simd::kWidth;
    int col = 0;
    if (dtype == DType::kFloat32) {
        const float* src = static_cast<const float*>(row);
        for (; col + kWidth <= cols; col += kWidth) Simd::store(dst + col, Simd::load(src + col));
        for (; col < cols; ++col) dst[col] = src[col];
    } else if (dtype == DType::kBFloat16) {
        const uint16_t* src = static_cast<const uint16_t*>(row);
        for (; col + kWidth <= cols; col += kWidth) {
            Simd::store(dst + col, Simd::load_bf16(src + col));
        }
        for (; col < cols; ++col) dst[col] = bf16_to_float(src[col]);
    } else {
        const uint16_t* src = static_cast<const uint16_t*>(row);
        for (; col + kWidth <= cols; col += kWidth) {
            Simd::store(dst + col, Simd::load_fp16(src + col));
        }
        for (; col < cols; ++col) dst[col] = fp16_to_float(src[col]);
    }
    for (; col < cols_padded; ++col) dst[col] = 0.0f;
}

template <class Simd>
void store_row_from_float(const float* src, int cols, float scale, void* row, DType dtype) {
    constexpr int kWidth = Simd::kWidth;
    const auto factor = Simd::broadcast(scale);
    int col = 0;
    if (dtype == DType::kFloat32) {
        float* dst = static_cast<float*>(row);
        for (; col + kWidth <= cols; col += kWidth) {
            Simd::store(dst + col, Simd::mul(Simd::load(src + col), factor));
        }
        for (; col < cols; ++col) dst[col] = src[col] * scale;
    } else if (dtype == DType::kBFloat16) {
        uint16_t* dst = static_cast<uint16_t*>(row);
        for (; col + kWidth <= cols; col += kWidth) {
            Simd::store_bf16(dst + col, Simd::mul(Simd::load(src + col), factor));
        }
        for (; col < cols; ++col) dst[col] = float_to_bf16(src[col] * scale);
    } else {
        uint16_t* dst = static_cast<uint16_t*>(row);
        for (; col + kWidth <= cols; col += kWidth) {
            Simd::store_fp16(dst + col, Simd::mul(Simd::load(src + col), factor));
        }
        for (; col < cols; ++col) dst[col] = float_to_fp16(src[col] * scale);
    }
}

inline const void* row_address(const TensorRows& src, int64_t row) {
    return static_cast<const char*>(src.data) + row * src.row_stride * size_of(src.dtype);
}

template <class Simd>
void load_operand_row(const TensorRows& src, int row, int cols_padded, float* dst) {
    load_row_as_float<Simd>(row_address(src, row), src.dtype, src.cols, cols_padded, dst);
}

/// bf16 engines serve bf16 tensors alone: a copy.
template <class Simd>
void load_operand_row(const TensorRows& src, int row, int cols_padded, uint16_t* dst) {
    std::memcpy(dst, row_address(src, row), static_cast<size_t>(src.cols) * 2);
    std::memset(dst + src.cols, 0, static_cast<size_t>(cols_padded - src.cols) * 2);
}

/// kPanel rows of a tensor from row_begin on, as operands, zero where the tensor ends.
template <class Operand>
void load_rows(const TensorRows& src, int row_begin, typename Operand::Type* dst, int64_t ld) {
    const int cols_padded = static_cast<int>(round_up(src.cols, kPanel));
    for (int r = 0; r < kPanel; ++r, dst += ld) {
        if (src.data != nullptr && row_begin + r < src.rows) {
            load_operand_row<typename Operand::Simd>(src, row_begin + r, cols_padded, dst);
        } else {
            std::memset(dst, 0, static_cast<size_t>(cols_padded) * sizeof *dst);
        }
    }
}

template <class Operand>
void pack_a(const TensorRows& src, void* a, int64_t lda) {
    auto* dst = static_cast<typename Operand::Type*>(a);
    for (int row = 0; row < src.rows; row += kPanel)
        load_rows<Operand>(src, row, dst + row * lda, lda);
}

/// The other forms go through a panel of rows in A form on the stack.
template <class Operand>
struct RowPanel {
    explicit RowPanel(int cols) : ld(round_up(cols, kPanel)) {}

    const int64_t ld;
    alignas(64) typename Operand::Type rows[kPanel * kMaxHeadDim];
};

template <class Operand>
void pack_a_transposed(const TensorRows& src, void* a, int64_t lda) {
    using Type = typename Operand::Type;
    RowPanel<Operand> panel(src.cols);
    const int cols_padded = static_cast<int>(panel.ld);
    for (int row = 0; row < src.rows; row += kPanel) {
        load_rows<Operand>(src, row, panel.rows, panel.ld);
        Operand::transpose(panel.rows, panel.ld, cols_padded, static_cast<Type*>(a) + row, lda);
    }
}

template <class Operand>
void pack_b(const TensorRows& src, void* b, int64_t panel_stride) {
    using Type = typename Operand::Type;
    RowPanel<Operand> panel(src.cols);
    for (int row = 0; row < src.rows; row += kPanel) {
        load_rows<Operand>(src, row, panel.rows, panel.ld);
        Type* dst = static_cast<Type*>(b) + int64_t{row} * kPanel;
        for (int col = 0; col < src.cols; col += kPanel, dst += panel_stride) {
            for (int r = 0; r < kPanel; r += 2) {
                const Type* rows = panel.rows + r * panel.ld + col;
                Operand::interleave_pair(rows, rows + panel.ld, dst + r * kPanel);
            }
        }
    }
}

/// A transpose of 32-bit words, each one fp32 or a pair of bf16.
template <class Operand>
void pack_b_transposed(const TensorRows& src, void* b, int64_t panel_stride) {
    using Simd = typename Operand::Simd;
    using Type = typename Operand::Type;
    RowPanel<Operand> panel(src.cols);
    const int words = static_cast<int>(panel.ld) / Operand::kPerWord;
    const auto* rows = reinterpret_cast<const float*>(panel.rows);
    Type* dst = static_cast<Type*>(b);
    for (int row = 0; row < src.rows; row += kPanel, dst += panel_stride) {
        load_rows<Operand>(src, row, panel.rows, panel.ld);
        auto* dst_words = reinterpret_cast<float*>(dst);
        for (int word = 0; word < words; word += Simd::kWidth) {
            for (int r = 0; r < kPanel; r += Simd::kWidth) {
                Simd::transpose_words(rows + r * words + word, words, dst_words + word * kPanel + r,
                                      kPanel);
            }
        }
    }
}

template <class Simd>
void store_rows(const float* src, int64_t ld, int rows, int cols, float scale, const float* factors,
                void* dst, DType dtype, int64_t row_stride) {
    char* out = static_cast<char*>(dst);
    for (int r = 0; r < rows; ++r, src += ld, out += row_stride * size_of(dtype)) {
        store_row_from_float<Simd>(src, cols, factors ? scale * factors[r] : scale, out, dtype);
    }
}

template <class Simd>
void store_transposed(const float* src, int64_t ld, int rows, int cols, float scale, void* dst,
                      DType dtype, int64_t row_stride) {
    alignas(64) float block[kPanel * kMaxHeadDim];
    const int64_t ld_block = round_up(rows, kPanel);
    char* out = static_cast<char*>(dst);
    for (int col = 0; col < cols; col += kPanel) {
        // src is padded: all of its panels are whole.
        for (int r = 0; r < rows; r += Simd::kWidth) {
            for (int c = 0; c < kPanel; c += Simd::kWidth) {
                Simd::transpose_words(src + r * ld + col + c, ld, block + c * ld_block + r,
                                      ld_block);
            }
        }
        const int count = cols - col < kPanel ? cols - col : kPanel;
        store_rows<Simd>(block, ld_block, count, rows, scale, nullptr, out, dtype, row_stride);
        out += count * row_stride * size_of(dtype);
    }
}

template <class Simd>
void scale_rows(float* x, int64_t ld, int rows, int cols, const float* factors) {
    for (int r = 0; r < rows; ++r, x += ld) {
        if (factors[r] == 1.0f) continue;
        const auto factor = Simd::broadcast(factors[r]);
        for (int c = 0; c < cols; c += Simd::kWidth) {
            Simd::store(x + c, Simd::mul(Simd::load(x + c), factor));
        }
    }
}

template <class Simd>
void dot_rows(const TensorRows& a, const TensorRows& b, float* sums) {
    alignas(64) float row_a[kMaxHeadDim];
    alignas(64) float row_b[kMaxHeadDim];
    const int cols_padded = static_cast<int>(round_up(a.cols, kPanel));
    for (int r = 0; r < a.rows; ++r) {
        load_operand_row<Simd>(a, r, cols_padded, row_a);
        load_operand_row<Simd>(b, r, cols_padded, row_b);
        auto sum = Simd::broadcast(0.0f);
        for (int c = 0; c < cols_padded; c += Simd::kWidth) {
            sum = Simd::fma(Simd::load(row_a + c), Simd::load(row_b + c), sum);
        }
        sums[r] = Simd::reduce_add(sum);
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
