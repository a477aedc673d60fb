#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// stmatrix.x4 (sm_90), the inverse of ldmatrix_x4: lanes 8i..8i+7 hold the addresses of the rows
/// of matrix i, and lane l gives elements (l / 4, 2 (l % 4)) and the next one of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
        "r"(r0), "r"(r1), "r"(r2), "r"(r3)
        : "memory");
}

/// stmatrix.x4.trans (sm_90): the same, each matrix transposed on the way.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
        "r"(r0), "r"(r1), "r"(r2), "r"(r3)
        : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
