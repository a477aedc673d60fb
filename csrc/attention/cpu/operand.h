#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// How an engine stores operands; see the forms in tile_engine.h. A "pair" is rows r and r + 1 of
/// a panel, r even; it begins at r * kPanel in both engines.
template <class SimdType>
struct FloatOperand {
    using Simd = SimdType;
    using Vec = typename Simd::Vec;
    using Type = float;
    static constexpr int kPerWord = 1;      // operands in 32 bits
    static constexpr bool kRounds = false;  // true: upper(v) are the digits that an operand holds

    /// 2^x, as precise as the operand needs it.
    static Vec exp2(Vec x) { return Simd::exp2(x); }
    static void store(float* p, Vec v) { Simd::store(p, v); }
    /// Columns col.. of both rows of a pair.
    static void store_pair(float* pair, int col, Vec row0, Vec row1) {
        Simd::store(pair + col, row0);
        Simd::store(pair + kPanel + col, row1);
    }
    static void interleave_pair(const float* row0, const float* row1, float* pair) {
        for (int col = 0; col < kPanel; col += Simd::kWidth) {
            store_pair(pair, col, Simd::load(row0 + col), Simd::load(row1 + col));
        }
    }
    /// dst[col][row] = src[row][col] for kPanel rows.
    static void transpose(const float* src, int64_t ld_src, int cols, float* dst, int64_t ld_dst) {
        for (int col = 0; col < cols; col += Simd::kWidth) {
            for (int row = 0; row < kPanel; row += Simd::kWidth) {
                Simd::transpose_words(src + row * ld_src + col, ld_src, dst + col * ld_dst + row,
                                      ld_dst);
            }
        }
    }
};

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
