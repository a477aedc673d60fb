#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ldmatrix.x4: four 8x8 matrices of 16-bit elements. Lanes 8i..8i+7 hold the addresses of the rows
/// of matrix i; lane l receives elements (l / 4, 2 (l % 4)) and the next one of matrix i in
/// fragment[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

/// ldmatrix.x4.trans: the same, each matrix transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
