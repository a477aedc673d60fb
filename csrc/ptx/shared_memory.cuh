#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ld.shared.v2.f32: two floats at an address of a multiple of 8.
__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(address));
    return value;
}

/// ld.shared.v4.f32: four floats at an address of a multiple of 16.
__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

/// ld.shared.f32.
__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(address));
    return value;
}

/// ld.shared.u32.
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
    return value;
}

/// st.shared.v4.f32: four floats to an address of a multiple of 16.
__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, float a, float b, float c,
                                                 float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
