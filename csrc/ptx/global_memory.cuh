#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// st.global under a predicate, 16 bytes: no branch, on which the lanes of a warp might part.
__device__ __forceinline__ void st_global_if(bool condition, void* address, uint4 value) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.b32 p, %0, 0;\n"
        "  @p st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
        "}\n" ::"r"(static_cast<int>(condition)),
        "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
