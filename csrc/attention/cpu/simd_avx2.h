#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

struct Avx2Simd {
    using Vec = __m256;
    static constexpr int kWidth = 8;

    static Vec broadcast(float x) { return _mm256_set1_ps(x); }
    static Vec load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
    /// The smaller one, b if either is NaN.
    static Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
    static Vec abs(Vec a) { return _mm256_andnot_ps(broadcast(-0.0f), a); }
    /// x where a < b, else y.
    static Vec select_less(Vec a, Vec b, Vec x, Vec y) {
        return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }
    static float reduce_add(Vec v) {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    static float reduce_max(Vec v) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }

    /// 2^x for x <= 128, relative error about 2 ulp; 0 below -126.
    static Vec exp2(Vec x) {
        // max's second operand wins over a NaN, so NaN stays.
        const Vec clamped = _mm256_max_ps(broadcast(-127.0f), x);
        const Vec n = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const Vec f = _mm256_sub_ps(clamped, n);
        Vec p = broadcast(1.53533619e-4f);
        p = fma(p, f, broadcast(1.3398875e-3f));
        p = fma(p, f, broadcast(9.61843692e-3f));
        p = fma(p, f, broadcast(5.55033237e-2f));
        p = fma(p, f, broadcast(0.240226477f));
        p = fma(p, f, broadcast(0.693147182f));
        p = fma(p, f, broadcast(1.0f));
        const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
        const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
        const Vec is_small = _mm256_cmp_ps(x, broadcast(-126.0f), _CMP_LT_OQ);
        const Vec result = _mm256_andnot_ps(is_small, scaled);
        return _mm256_blendv_ps(result, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }

    static Vec load_bf16(const uint16_t* p) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static Vec load_fp16(const uint16_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_bf16(uint16_t* p, Vec v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
        const __m256i high = _mm256_srli_epi32(rounded, 16);
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    }
    static void store_fp16(uint16_t* p, Vec v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                         _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    /// kWidth unsigned 32-bit numbers.
    using Bits = __m256i;
    static Bits broadcast_bits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static Bits count_from(uint32_t first) {
        return _mm256_add_epi32(broadcast_bits(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static Bits exclusive_or(Bits a, Bits b, Bits c) {
        return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
    }
    /// The halves of the 64-bit products a * b.
    static void multiply_wide(Bits a, Bits b, Bits* high, Bits* low) {
        const __m256i even = _mm256_mul_epu32(a, b);
        const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
        *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
        *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    }
    /// value where bits >= bound, else 0.
    static Vec value_where_at_least(Bits bits, Bits bound, Vec value) {
        const __m256i mask = _mm256_cmpeq_epi32(_mm256_max_epu32(bits, bound), bits);
        return _mm256_and_ps(_mm256_castsi256_ps(mask), value);
    }

    /// dst[c][r] = src[r][c] of a kWidth x kWidth block of 32-bit words.
    static void transpose_words(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
        Vec row[8], half[8];
        for (int r = 0; r < 8; ++r) row[r] = load(src + r * ld_src);
        for (int r = 0; r < 8; r += 4) {  // 4 x 4 blocks, one per 128-bit lane
            const Vec low0 = _mm256_unpacklo_ps(row[r], row[r + 1]);
            const Vec high0 = _mm256_unpackhi_ps(row[r], row[r + 1]);
            const Vec low1 = _mm256_unpacklo_ps(row[r + 2], row[r + 3]);
            const Vec high1 = _mm256_unpackhi_ps(row[r + 2], row[r + 3]);
            half[r] = _mm256_shuffle_ps(low0, low1, 0x44);
            half[r + 1] = _mm256_shuffle_ps(low0, low1, 0xee);
            half[r + 2] = _mm256_shuffle_ps(high0, high1, 0x44);
            half[r + 3] = _mm256_shuffle_ps(high0, high1, 0xee);
        }
        for (int c = 0; c < 4; ++c) {
            store(dst + c * ld_dst, _mm256_permute2f128_ps(half[c], half[c + 4], 0x20));
            store(dst + (c + 4) * ld_dst, _mm256_permute2f128_ps(half[c], half[c + 4], 0x31));
        }
    }
};

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
