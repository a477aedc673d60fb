#pragma once

namespace flash_attn_norm {
namespace cpu {
namespace {

/// c[kRows, kVecs vectors] (+)= a[kRows, k] * b[k, kVecs vectors], all sums in registers.
template <class Simd, int kRows, int kVecs>
void gemm_f32_block(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int k,
                    bool accumulate) {
    using Vec = typename Simd::Vec;
    Vec acc[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) {
            acc[r][v] =
                accumulate ? Simd::load(c + r * ldc + v * Simd::kWidth) : Simd::broadcast(0.0f);
        }
    }
    for (int i = 0; i < k; ++i, b += kPanel) {
        Vec row_b[kVecs];
        for (int v = 0; v < kVecs; ++v) row_b[v] = Simd::load(b + v * Simd::kWidth);
        for (int r = 0; r < kRows; ++r) {
            const Vec factor = Simd::broadcast(a[r * lda + i]);
            for (int v = 0; v < kVecs; ++v) acc[r][v] = Simd::fma(factor, row_b[v], acc[r][v]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVecs; ++v) Simd::store(c + r * ldc + v * Simd::kWidth, acc[r][v]);
    }
}

/// The last m < kRows rows: the block of just that many.
template <class Simd, int kRows, int kVecs>
void gemm_f32_last_rows(int m, const float* a, int64_t lda, const float* b, float* c, int64_t ldc,
                        int k, bool accumulate) {
    if constexpr (kRows > 1) {
        if (m < kRows) {
            gemm_f32_last_rows<Simd, kRows - 1, kVecs>(m, a, lda, b, c, ldc, k, accumulate);
            return;
        }
    }
    gemm_f32_block<Simd, kRows, kVecs>(a, lda, b, c, ldc, k, accumulate);
}

template <class Simd, int kRows, int kVecs>
void gemm_f32(const GemmArgs& args) {
    constexpr int kCols = kVecs * Simd::kWidth;
    const float* a = static_cast<const float*>(args.a);
    for (int n = 0; n < args.n; n += kCols) {
        const float* b =
            static_cast<const float*>(args.b) + n / kPanel * args.b_panel_stride + n % kPanel;
        float* c = args.c + n;
        int m = 0;
        for (; m + kRows <= args.m; m += kRows) {
            gemm_f32_block<Simd, kRows, kVecs>(a + m * args.lda, args.lda, b, c + m * args.ldc,
                                               args.ldc, args.k, args.accumulate);
        }
        if (m < args.m) {
            gemm_f32_last_rows<Simd, kRows - 1, kVecs>(args.m - m, a + m * args.lda, args.lda, b,
                                                       c + m * args.ldc, args.ldc, args.k,
                                                       args.accumulate);
        }
    }
}

}  // namespace
}  // namespace cpu
}  // namespace flash_attn_norm
