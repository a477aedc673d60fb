#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ld.global.cs, 16 bytes: for data that is read once, which leaves the caches first. (CUDA's
/// __ldcs, which clang's headers lack.)
__device__ __forceinline__ uint4 ld_global_cs(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}
__device__ __forceinline__ float4 ld_global_cs(const float4* address) {
    float4 value;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(address));
    return value;
}

/// ld.global.cg, 16 bytes: from the L2 cache, for data that other multiprocessors wrote in this
/// kernel.
__device__ __forceinline__ float4 ld_global_cg(const float* address) {
    float4 value;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

}  // namespace ptx
}  // namespace flash_attn_norm
