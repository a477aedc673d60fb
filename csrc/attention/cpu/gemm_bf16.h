#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// c[kRows, kPanel] (+)= a[kRows, k] * b[k, kPanel] with vdpbf16ps: two k of one column a lane.
template <int kRows>
void gemm_bf16_block(const uint16_t* a, int64_t lda, const uint16_t* b, float* c, int64_t ldc,
                     int k, bool accumulate) {
    __m512 acc[kRows][2];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) {
            acc[r][v] = accumulate ? _mm512_loadu_ps(c + r * ldc + v * 16) : _mm512_setzero_ps();
        }
    }
    for (int i = 0; i < k; i += 2, b += 2 * kPanel) {
        const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
        const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + kPanel));
        for (int r = 0; r < kRows; ++r) {
            int pair;
            std::memcpy(&pair, a + r * lda + i, sizeof pair);
            const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], factor, b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], factor, b1);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) _mm512_storeu_ps(c + r * ldc + v * 16, acc[r][v]);
    }
}

/// The last m < kRows rows: the block of just that many.
template <int kRows>
void gemm_bf16_last_rows(int m, const uint16_t* a, int64_t lda, const uint16_t* b, float* c,
                         int64_t ldc, int k, bool accumulate) {
    if constexpr (kRows > 1) {
        if (m < kRows) {
            gemm_bf16_last_rows<kRows - 1>(m, a, lda, b, c, ldc, k, accumulate);
            return;
        }
    }
    gemm_bf16_block<kRows>(a, lda, b, c, ldc, k, accumulate);
}

inline void gemm_bf16(const GemmArgs& args) {
    constexpr int kRows = 12;
    const uint16_t* a = static_cast<const uint16_t*>(args.a);
    const uint16_t* b = static_cast<const uint16_t*>(args.b);
    for (int n = 0; n < args.n; n += kPanel, b += args.b_panel_stride) {
        int m = 0;
        for (; m + kRows <= args.m; m += kRows) {
            gemm_bf16_block<kRows>(a + m * args.lda, args.lda, b, args.c + m * args.ldc + n,
                                   args.ldc, args.k, args.accumulate);
        }
        if (m < args.m) {
            gemm_bf16_last_rows<kRows - 1>(args.m - m, a + m * args.lda, args.lda, b,
                                           args.c + m * args.ldc + n, args.ldc, args.k,
                                           args.accumulate);
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
