#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// bf16 operands with AVX-512 BF16's conversions; see FloatOperand for the functions.
struct Bf16Operand {
    using Simd = Avx512Simd;
    using Vec = Simd::Vec;
    using Type = uint16_t;
    static constexpr int kPerWord = 2;
    static constexpr bool kRounds = true;

    static Vec upper(Vec v) {
        const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), mask));
    }

    /// Relative error 3e-6: the degree that is far below bf16's rounding (2e-3) and still good
    /// for the sum that softmax_lse comes from.
    static Vec exp2(Vec x) {
        const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Vec p = Simd::broadcast(1.34266876e-2f);
        p = Simd::fma(p, f, Simd::broadcast(5.22424690e-2f));
        p = Simd::fma(p, f, Simd::broadcast(0.241280213f));
        p = Simd::fma(p, f, Simd::broadcast(0.693044841f));
        p = Simd::fma(p, f, Simd::broadcast(1.0f));
        return _mm512_scalef_ps(p, x);
    }
    static void store(uint16_t* p, Vec v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
    }
    static void store_pair(uint16_t* pair, int col, Vec row0, Vec row1) {
        const __m512i rows = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(row1, row0));
        store_words(pair + 2 * col, _mm512_permutexvar_epi16(interleave_low(), rows));
    }
    static void interleave_pair(const uint16_t* row0, const uint16_t* row1, uint16_t* pair) {
        const __m512i a = load_words(row0);
        const __m512i b = load_words(row1);
        // In a two-table permutation index i of the second table is i + 32.
        const __m512i from_b = _mm512_set1_epi32(16 << 16);
        const __m512i low = _mm512_add_epi16(interleave_low(), from_b);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        store_words(pair, _mm512_permutex2var_epi16(a, low, b));
        store_words(pair + kPanel, _mm512_permutex2var_epi16(a, high, b));
    }
    static void transpose(const uint16_t* src, int64_t ld_src, int cols, uint16_t* dst,
                          int64_t ld_dst) {
        // First as words of two columns, then the columns apart.
        constexpr int kWords = 16;
        alignas(64) float words[kWords * kPanel];
        const __m512i even = _mm512_slli_epi16(iota_16(), 1);
        const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
        for (int col = 0; col < cols; col += kPanel) {
            for (int row = 0; row < kPanel; row += 16) {
                Simd::transpose_words(reinterpret_cast<const float*>(src + row * ld_src + col),
                                      ld_src / 2, words + row, kPanel);
            }
            for (int word = 0; word < kWords; ++word) {
                const __m512i a = load_words(words + word * kPanel);
                const __m512i b = load_words(words + word * kPanel + 16);
                uint16_t* out = dst + (col + 2 * word) * ld_dst;
                store_words(out, _mm512_permutex2var_epi16(a, even, b));
                store_words(out + ld_dst, _mm512_permutex2var_epi16(a, odd, b));
            }
        }
    }

  private:
    static __m512i load_words(const void* p) { return _mm512_loadu_si512(p); }
    static void store_words(void* p, __m512i v) { _mm512_storeu_si512(p, v); }
    /// 0, 1, 2, ... 31 in 16-bit lanes.
    static __m512i iota_16() {
        return _mm512_or_si512(
            _mm512_slli_epi32(iota_32(), 1),
            _mm512_slli_epi32(
                _mm512_add_epi32(_mm512_slli_epi32(iota_32(), 1), _mm512_set1_epi32(1)), 16));
    }
    static __m512i iota_32() {
        return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    }
    /// 0, 16, 1, 17, ... 15, 31 in 16-bit lanes.
    static __m512i interleave_low() {
        const __m512i second =
            _mm512_slli_epi32(_mm512_add_epi32(iota_32(), _mm512_set1_epi32(16)), 16);
        return _mm512_or_si512(iota_32(), second);
    }
};

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
