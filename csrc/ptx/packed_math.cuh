#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// fma.rn.bf16x2 with an addend of -0, which changes no product: two bfloat16 products, each
/// rounded once. (mul.bf16x2 needs sm_90.)
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

/// mul.rn.f16x2: two float16 products, each rounded once.
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

}  // namespace ptx
}  // namespace flash_attn_norm
