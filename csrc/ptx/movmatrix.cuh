#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// movmatrix.m8n8.trans (sm_75): an 8 x 8 matrix of 16-bit elements, thread t holding columns
/// 2 (t % 4) and 2 (t % 4) + 1 of row t / 4, becomes its transpose, held likewise.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t matrix) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n"
                 : "=r"(transposed)
                 : "r"(matrix));
    return transposed;
}

}  // namespace ptx
}  // namespace flash_attn_norm
