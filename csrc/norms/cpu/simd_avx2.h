// Included inside the namespace of one instruction set; see row_kernels_avx2.cpp.

/// Eight floats in a 256-bit register. Needs AVX2, FMA and F16C.
struct Simd {
    static constexpr int kWidth = 8;
    using Vector = __m256;

    static Vector set(float value) { return _mm256_set1_ps(value); }
    static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
    static Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
    static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
    /// a * b + c
    static Vector mul_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(Vector a) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }

    static Vector load(const float* source) { return _mm256_loadu_ps(source); }
    static Vector load(const BFloat16* source) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static Vector load(const Float16* source) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    }
    static void store(float* target, Vector a) { _mm256_storeu_ps(target, a); }
    static void store(BFloat16* target, Vector a) {
        const __m256i rounded = bfloat16_bits(a);
        const __m256i packed =
            _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
    }
    static void store(Float16* target, Vector a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                         _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    /// The value that storing as Element and loading again gives.
    template <class Element>
    static Vector round_to(Vector a) {
        if (std::is_same_v<Element, BFloat16>) {
            return _mm256_castsi256_ps(_mm256_slli_epi32(bfloat16_bits(a), 16));
        }
        if (std::is_same_v<Element, Float16>) {
            return _mm256_cvtph_ps(
                _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
        return a;
    }

  private:
    /// Rounded to nearest even, NaN to a quiet NaN; in the low half of each lane.
    static __m256i bfloat16_bits(Vector a) {
        const __m256i bits = _mm256_castps_si256(a);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(
            _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
        return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    }
};
