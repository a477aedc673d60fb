// Included inside the namespace of one instruction set; see row_kernels_avx512.cpp.

/// Sixteen floats in a 512-bit register. Needs AVX-512 F, BW, DQ and VL.
struct Simd {
    static constexpr int kWidth = 16;
    using Vector = __m512;

    static Vector set(float value) { return _mm512_set1_ps(value); }
    static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
    static Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
    static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
    /// a * b + c
    static Vector mul_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Vector a) { return _mm512_reduce_add_ps(a); }

    static Vector load(const float* source) { return _mm512_loadu_ps(source); }
    static Vector load(const BFloat16* source) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static Vector load(const Float16* source) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
    }
    static void store(float* target, Vector a) { _mm512_storeu_ps(target, a); }
    static void store(BFloat16* target, Vector a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                            _mm512_cvtepi32_epi16(bfloat16_bits(a)));
    }
    static void store(Float16* target, Vector a) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                            _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    /// The value that storing as Element and loading again gives.
    template <class Element>
    static Vector round_to(Vector a) {
        if (std::is_same_v<Element, BFloat16>) {
            return _mm512_castsi512_ps(_mm512_slli_epi32(bfloat16_bits(a), 16));
        }
        if (std::is_same_v<Element, Float16>) {
            return _mm512_cvtph_ps(
                _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
        return a;
    }

  private:
    /// Rounded to nearest even, NaN to a quiet NaN; in the low half of each lane.
    static __m512i bfloat16_bits(Vector a) {
        const __m512i bits = _mm512_castps_si512(a);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_srli_epi32(
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        return _mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7fc0));
    }
};
