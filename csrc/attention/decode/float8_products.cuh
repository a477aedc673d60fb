#pragma once

#include <cstdint>

#include "attention/element.cuh"
#include "attention/float8.h"
#include "ptx/float8.cuh"

/// Products with tiles of e4m3 numbers, which become float16 on their way from shared memory to the
/// tensor cores. ldmatrix moves pairs of bytes, so a lane gets four numbers of a row (keys) or two
/// of each of two rows (values). What it makes of them are fragments of numbers 0, 2, 4, ... of 16
/// columns and of 1, 3, 5, ...: the columns of Q come in that order (load_float8_queries), and
/// those of the output leave in it (share_output).
namespace flash_attn_norm {
namespace decode {

/// Bytes 0 and 2 of a word in `even`, 1 and 3 in `odd`, divided by Arch::kFloat8Scale.
template <class Arch>
__device__ __forceinline__ void unpack_e4m3(uint32_t word, uint32_t& even, uint32_t& odd) {
    if constexpr (Arch::kConvertsFloat8) {
        const uint32_t ordered = __byte_perm(word, 0, 0x3120);
        even = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(ordered));
        odd = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(ordered >> 16));
    } else {
        e4m3_to_scaled_float16(word, even, odd);
    }
}

/// acc_s += Q K^T for 16 rows. load_q(a, step) gives Q's fragment of 16 columns, load_k(b, n, pair)
/// the bytes of keys 16 n.. and of two such steps, in the order of columns_first. between(i) runs
/// after the i-th of kSteps * kTilesN / 4 groups of products.
template <class Arch, int kSteps, int kTilesN, class LoadQ, class LoadK, class Between>
__device__ __forceinline__ void multiply_float8_keys(float (&acc_s)[1][kTilesN][4], LoadQ&& load_q,
                                                     LoadK&& load_k, Between&& between) {
    static_assert(kSteps % 2 == 0, "fragments come in pairs");
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
        uint32_t a[2][4];
        load_q(a[0], 2 * pair);
        load_q(a[1], 2 * pair + 1);
#pragma unroll
        for (int n = 0; n < kTilesN / 2; ++n) {
            uint32_t b[4];
            load_k(b, n, pair);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t even, odd;
                unpack_e4m3<Arch>(b[i], even, odd);
                Float16::mma(acc_s[0][2 * n + i / 2], a[i % 2], even, odd);
            }
            between(pair * kTilesN / 2 + n);
        }
    }
}

/// acc_o += P V for 16 rows. load_v(b, n, k) gives the bytes of keys 16 k.. and columns 32 n.., in
/// the order of rows_first, transposed in pairs. Tiles 2 i and 2 i + 1 of acc_o are the even and
/// odd columns of 16 i...
template <class Arch, int kTilesN, int kTilesD, class LoadV, class Between>
__device__ __forceinline__ void multiply_float8_values(float (&acc_o)[1][kTilesD][4],
                                                       const float (&p)[1][kTilesN][4],
                                                       LoadV&& load_v, Between&& between) {
    static_assert(kTilesD % 4 == 0, "32 columns at a time");
#pragma unroll
    for (int k = 0; k < kTilesN / 2; ++k) {
        const float (&left)[4] = p[0][2 * k], (&right)[4] = p[0][2 * k + 1];
        const uint32_t a[4] = {Float16::pack(left[0], left[1]), Float16::pack(left[2], left[3]),
                               Float16::pack(right[0], right[1]),
                               Float16::pack(right[2], right[3])};
#pragma unroll
        for (int n = 0; n < kTilesD / 4; ++n) {
            uint32_t b[4];
            load_v(b, n, k);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t even[2], odd[2];
                unpack_e4m3<Arch>(b[2 * half], even[0], odd[0]);
                unpack_e4m3<Arch>(b[2 * half + 1], even[1], odd[1]);
                Float16::mma(acc_o[0][4 * n + 2 * half], a, even[0], even[1]);
                Float16::mma(acc_o[0][4 * n + 2 * half + 1], a, odd[0], odd[1]);
            }
            between(k * kTilesD / 4 + n);
        }
    }
}

/// Scores of float8 products: see load_float8_queries. `factors`: of this lane's two rows.
template <int kTilesN>
__device__ __forceinline__ void scale_scores(float (&acc_s)[1][kTilesN][4],
                                             const float (&factors)[2]) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[0][n][e] *= factors[e >> 1];
    }
}

}  // namespace decode
}  // namespace flash_attn_norm
