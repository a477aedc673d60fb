#pragma once

#include <cstdint>

#include "attention/sm90/wgmma_type.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace flash_attn_norm {
namespace sm90 {

template <class Element, int kN>
using ElementWgmma = ptx::Wgmma<wgmma_type<Element>(), kN>;

/// acc = A B^T for 64 rows of A and the first rows of B, both tiles contracted
/// over their columns. `a` and `b` are their column descriptors; the caller
/// fences and commits.
template <class Element, class LayoutA, class LayoutB, int kTilesN>
__device__ __forceinline__ void gemm_columns(float (&acc)[1][kTilesN][4], uint64_t a, uint64_t b) {
    static_assert(LayoutA::kColumns == LayoutB::kColumns, "the contraction");
    static_assert(LayoutB::kRows >= kTilesN * 8, "a row of B for each column");
    using Mma = ElementWgmma<Element, kTilesN * 8>;
    constexpr ptx::Major kColumns = ptx::Major::kContraction;
#pragma unroll
    for (int k = 0; k < LayoutA::kColumns / 16; ++k) {
        Mma::template ss<kColumns, kColumns>(&acc[0][0][0],
                                             a + (LayoutA::column_step_offset(k) >> 4),
                                             b + (LayoutB::column_step_offset(k) >> 4), k != 0);
    }
}

/// The same for A in registers, four of them per step.
template <class Element, class LayoutB, int kTilesN>
__device__ __forceinline__ void gemm_columns(float (&acc)[1][kTilesN][4],
                                             const uint32_t (&a)[LayoutB::kColumns / 4],
                                             uint64_t b) {
    static_assert(LayoutB::kRows >= kTilesN * 8, "a row of B for each column");
    using Mma = ElementWgmma<Element, kTilesN * 8>;
#pragma unroll
    for (int k = 0; k < LayoutB::kColumns / 16; ++k) {
        Mma::template rs<ptx::Major::kContraction>(
            &acc[0][0][0], a + 4 * k, b + (LayoutB::column_step_offset(k) >> 4), k != 0);
    }
}

/// Rows first_row..first_row + 15 of a tile at `address` as this warp's part of an A operand in
/// registers.
template <class Layout>
__device__ __forceinline__ void load_operand(uint32_t (&a)[Layout::kColumns / 4], uint32_t address,
                                             int first_row, int lane) {
#pragma unroll
    for (int k = 0; k < Layout::kColumns / 16; ++k) {
        auto& fragment = reinterpret_cast<uint32_t (&)[4]>(a[4 * k]);
        ptx::ldmatrix_x4(fragment,
                         address + Layout::unit_offset(first_row + lane % 16, 2 * k + lane / 16));
    }
}

/// acc += P B for P in registers (four of them per step) and a tile B,
/// contracted over its rows; `b` is its row descriptor.
template <class Element, class LayoutB, int kTilesN>
__device__ __forceinline__ void gemm_rows(float (&acc)[1][kTilesN][4],
                                          const uint32_t (&p)[LayoutB::kRows / 4], uint64_t b) {
    static_assert(LayoutB::kColumns == kTilesN * 8, "a column of B for each column");
    using Mma = ElementWgmma<Element, kTilesN * 8>;
#pragma unroll
    for (int k = 0; k < LayoutB::kRows / 16; ++k) {
        Mma::template rs<ptx::Major::kOuter>(&acc[0][0][0], p + 4 * k,
                                             b + (LayoutB::row_step_offset(k) >> 4), 1);
    }
}

}  // namespace sm90
}  // namespace flash_attn_norm
