#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ex2.approx.ftz: 2^x within 2 ulp; 0 for -inf.
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/// lg2.approx.ftz: the base-2 logarithm; -inf for 0.
__device__ __forceinline__ float lg2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/// rcp.approx.ftz: 1 / x within 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/// min.NaN.f32: the smaller one, NaN if either is (fminf would give the other one).
__device__ __forceinline__ float min_nan(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
}

/// cvt.rn.bf16x2.f32: two floats rounded to bfloat16, `low` in the low half.
__device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// cvt.rn.f16x2.f32: two floats rounded to float16, `low` in the low half.
__device__ __forceinline__ uint32_t cvt_rn_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// cvt.f32.f16 of the 16 bits of a float16.
__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;\n" : "=f"(value) : "h"(bits));
    return value;
}

}  // namespace ptx
}  // namespace flash_attn_norm
