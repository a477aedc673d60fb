#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"

namespace flash_attn_norm {

/// Byte offset of this lane's row in a 16 x 16 block for ldmatrix.x4. Blocks are ordered (rows 0-7,
/// columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): an A operand, or a B operand with .trans.
template <int kPitch>
__device__ __forceinline__ uint32_t rows_first(int lane) {
    return static_cast<uint32_t>(((lane & 15) * kPitch + (lane >> 4) * 8) * 2);
}

/// The same with blocks ordered (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): a B operand, or
/// an A operand with .trans.
template <int kPitch>
__device__ __forceinline__ uint32_t columns_first(int lane) {
    return static_cast<uint32_t>(
        (((lane & 7) + ((lane >> 4) << 3)) * kPitch + ((lane >> 3) & 1) * 8) * 2);
}

template <int kTilesM, int kTilesN>
__device__ __forceinline__ void clear(float (&acc)[kTilesM][kTilesN][4]) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
        }
    }
}

/// How an operand of a product over kSteps * 16 lies in shared memory: [outer][contraction] or
/// [contraction][outer].
enum class Layout { kContractionInner, kContractionOuter };

/// Address of the fragment of 16 outer indices and contraction step k.
template <Layout kLayout, int kPitch>
__device__ __forceinline__ uint32_t fragment_address(uint32_t base, int outer, int k) {
    const int row = kLayout == Layout::kContractionInner ? outer : k;
    const int column = kLayout == Layout::kContractionInner ? k : outer;
    return base + static_cast<uint32_t>((row * kPitch + column) * 16 * 2);
}

/// This lane's base address of an A operand that starts at `tile`.
template <Layout kLayout, int kPitch>
__device__ __forceinline__ uint32_t a_base(uint32_t tile, int lane) {
    return tile + (kLayout == Layout::kContractionInner ? rows_first<kPitch>(lane)
                                                        : columns_first<kPitch>(lane));
}
template <Layout kLayout, int kPitch>
__device__ __forceinline__ uint32_t b_base(uint32_t tile, int lane) {
    return tile + (kLayout == Layout::kContractionInner ? columns_first<kPitch>(lane)
                                                        : rows_first<kPitch>(lane));
}

template <Layout kLayout, int kPitch>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t base, int m, int k) {
    const uint32_t address = fragment_address<kLayout, kPitch>(base, m, k);
    if constexpr (kLayout == Layout::kContractionInner) {
        ptx::ldmatrix_x4(a, address);
    } else {
        ptx::ldmatrix_x4_trans(a, address);
    }
}

/// Two neighbouring B fragments (16 columns): {b[0], b[1]} and {b[2], b[3]}.
template <Layout kLayout, int kPitch>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t base, int n_pair, int k) {
    const uint32_t address = fragment_address<kLayout, kPitch>(base, n_pair, k);
    if constexpr (kLayout == Layout::kContractionInner) {
        ptx::ldmatrix_x4(b, address);
    } else {
        ptx::ldmatrix_x4_trans(b, address);
    }
}

struct Nothing {
    __device__ __forceinline__ void operator()(int) const {}
};

/// acc += A B, both operands in shared memory; `a` and `b` come from a_base and b_base. between(i)
/// runs after the i-th pair of columns of a contraction step (kSteps * kTilesN / 2 times in all):
/// independent work to hide among the products.
template <class Element, Layout kLayoutA, int kPitchA, Layout kLayoutB, int kPitchB, int kSteps,
          int kTilesM, int kTilesN, class Between = Nothing>
__device__ __forceinline__ void gemm(float (&acc)[kTilesM][kTilesN][4], uint32_t a, uint32_t b,
                                     Between&& between = {}) {
    static_assert(kTilesN % 2 == 0, "B fragments come in pairs");
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        uint32_t fragment_a[kTilesM][4];
        uint32_t fragment_b[kTilesN / 2][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) load_a<kLayoutA, kPitchA>(fragment_a[m], a, m, k);
#pragma unroll
        for (int n = 0; n < kTilesN / 2; ++n) load_b<kLayoutB, kPitchB>(fragment_b[n], b, n, k);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                Element::mma(acc[m][n], fragment_a[m], fragment_b[n / 2][2 * (n % 2)],
                             fragment_b[n / 2][2 * (n % 2) + 1]);
            }
            if (n % 2 == 1) between((k * kTilesN + n) / 2);
        }
    }
}

/// acc += A B^T for an A that was loaded before: fragments of kSteps steps.
template <class Element, int kPitchB, int kSteps, int kTilesM, int kTilesN, class Between = Nothing>
__device__ __forceinline__ void gemm_from_fragments(float (&acc)[kTilesM][kTilesN][4],
                                                    const uint32_t (&a)[kSteps][kTilesM][4],
                                                    uint32_t b, Between&& between = {}) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTilesN / 2; ++n) {
            uint32_t fragment_b[4];
            load_b<Layout::kContractionInner, kPitchB>(fragment_b, b, n, k);
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                Element::mma(acc[m][2 * n], a[k][m], fragment_b[0], fragment_b[1]);
                Element::mma(acc[m][2 * n + 1], a[k][m], fragment_b[2], fragment_b[3]);
            }
            between(k * kTilesN / 2 + n);
        }
    }
}

/// acc += P B with P in registers, an accumulator tile rounded to the element type: the fragment
/// layouts of an accumulator and of an A operand agree.
template <class Element, Layout kLayoutB, int kPitchB, int kTilesM, int kTilesK, int kTilesN>
__device__ __forceinline__ void gemm_from_registers(float (&acc)[kTilesM][kTilesN][4],
                                                    const float (&p)[kTilesM][kTilesK][4],
                                                    uint32_t b) {
    static_assert(kTilesK % 2 == 0 && kTilesN % 2 == 0, "fragments are 16 wide");
#pragma unroll
    for (int k = 0; k < kTilesK / 2; ++k) {
        uint32_t fragment_a[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            fragment_a[m][0] = Element::pack(p[m][2 * k][0], p[m][2 * k][1]);
            fragment_a[m][1] = Element::pack(p[m][2 * k][2], p[m][2 * k][3]);
            fragment_a[m][2] = Element::pack(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
            fragment_a[m][3] = Element::pack(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < kTilesN / 2; ++n) {
            uint32_t fragment_b[4];
            load_b<kLayoutB, kPitchB>(fragment_b, b, n, k);
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                Element::mma(acc[m][2 * n], fragment_a[m], fragment_b[0], fragment_b[1]);
                Element::mma(acc[m][2 * n + 1], fragment_a[m], fragment_b[2], fragment_b[3]);
            }
        }
    }
}

}  // namespace flash_attn_norm
