#pragma once

#include <cstdint>

#include "attention/sm90/wgmma_type.cuh"
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
