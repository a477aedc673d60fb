#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ld.global.nc.L1::no_allocate, 16 bytes: for data that is read once and by nobody written during
/// the kernel; leaves the L1 to data that is read again.
__device__ __forceinline__ uint4 ld_global_nc_no_allocate(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

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
