#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ld.global.nc, 16 bytes: for data that nobody writes during the kernel.
__device__ __forceinline__ uint4 ld_global_nc(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

}  // namespace ptx
}  // namespace flash_attn_norm
