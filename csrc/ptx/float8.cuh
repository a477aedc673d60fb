#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// cvt.rn.f16x2.e4m3x2 (from sm_89 on): two e4m3 numbers as float16, exactly;
/// NaN stays NaN.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(pair));
    return halves;
}

}  // namespace ptx
}  // namespace flash_attn_norm
