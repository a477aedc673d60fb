#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

struct Avx512Simd {
    using Vec = __m512;
    static constexpr int kWidth = 16;

    static Vec broadcast(float x) { return _mm512_set1_ps(x); }
    static Vec load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
    /// The smaller one, b if either is NaN.
    static Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
    static Vec abs(Vec a) { return _mm512_abs_ps(a); }
    /// x where a < b, else y.
    static Vec select_less(Vec a, Vec b, Vec x, Vec y) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
    }
    static float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
    static float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }

    /// 2^x for x <= 128, relative error about 2 ulp.
    static Vec exp2(Vec x) {
        // f = x - floor(x), 0 for an infinite x; scalef multiplies by 2^floor(x).
        const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Vec p = broadcast(2.16129192e-4f);
        p = fma(p, f, broadcast(1.24678458e-3f));
        p = fma(p, f, broadcast(9.67545155e-3f));
        p = fma(p, f, broadcast(5.54852821e-2f));
        p = fma(p, f, broadcast(0.240229309f));
        p = fma(p, f, broadcast(0.693147063f));
        p = fma(p, f, broadcast(1.0f));
        return _mm512_scalef_ps(p, x);
    }

    static Vec load_bf16(const uint16_t* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static Vec load_fp16(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_bf16(uint16_t* p, Vec v) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
    static void store_fp16(uint16_t* p, Vec v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }

    /// kWidth unsigned 32-bit numbers.
    using Bits = __m512i;
    static Bits broadcast_bits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static Bits count_from(uint32_t first) {
        return _mm512_add_epi32(
            broadcast_bits(first),
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    static Bits exclusive_or(Bits a, Bits b, Bits c) {
        return _mm512_ternarylogic_epi32(a, b, c, 0x96);
    }
    /// The halves of the 64-bit products a * b.
    static void multiply_wide(Bits a, Bits b, Bits* high, Bits* low) {
        const __m512i even = _mm512_mul_epu32(a, b);
        const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
        *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
        *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    }
    /// value where bits >= bound, else 0.
    static Vec value_where_at_least(Bits bits, Bits bound, Vec value) {
        return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(bits, bound), value);
    }

    /// dst[c][r] = src[r][c] of a kWidth x kWidth block of 32-bit words.
    static void transpose_words(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
        Vec row[16], quad[16];
        for (int r = 0; r < 16; ++r) row[r] = load(src + r * ld_src);
        for (int r = 0; r < 16; r += 4) {  // 4 x 4 blocks, one per 128-bit lane
            const Vec low0 = _mm512_unpacklo_ps(row[r], row[r + 1]);
            const Vec high0 = _mm512_unpackhi_ps(row[r], row[r + 1]);
            const Vec low1 = _mm512_unpacklo_ps(row[r + 2], row[r + 3]);
            const Vec high1 = _mm512_unpackhi_ps(row[r + 2], row[r + 3]);
            quad[r] = _mm512_shuffle_ps(low0, low1, 0x44);
            quad[r + 1] = _mm512_shuffle_ps(low0, low1, 0xee);
            quad[r + 2] = _mm512_shuffle_ps(high0, high1, 0x44);
            quad[r + 3] = _mm512_shuffle_ps(high0, high1, 0xee);
        }
        // A 4 x 4 transpose of the lanes: quad[4 i + c] holds rows 4 i .. 4 i + 3 of columns c,
        // c + 4, c + 8, c + 12.
        for (int c = 0; c < 4; ++c) {
            const Vec even0 = _mm512_shuffle_f32x4(quad[c], quad[c + 4], 0x88);
            const Vec odd0 = _mm512_shuffle_f32x4(quad[c], quad[c + 4], 0xdd);
            const Vec even1 = _mm512_shuffle_f32x4(quad[c + 8], quad[c + 12], 0x88);
            const Vec odd1 = _mm512_shuffle_f32x4(quad[c + 8], quad[c + 12], 0xdd);
            store(dst + c * ld_dst, _mm512_shuffle_f32x4(even0, even1, 0x88));
            store(dst + (c + 4) * ld_dst, _mm512_shuffle_f32x4(odd0, odd1, 0x88));
            store(dst + (c + 8) * ld_dst, _mm512_shuffle_f32x4(even0, even1, 0xdd));
            store(dst + (c + 12) * ld_dst, _mm512_shuffle_f32x4(odd0, odd1, 0xdd));
        }
    }
};

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
