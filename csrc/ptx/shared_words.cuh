#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// ld.shared.v4.u32: 16 bytes at an address of a multiple of 16.
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

/// st.shared.v4.u32: 16 bytes to an address of a multiple of 16.
__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

/// st.shared.f32.
__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address), "f"(value) : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
