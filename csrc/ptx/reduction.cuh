#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// red.global.add.f32: *address += value, without a result to wait for.
__device__ __forceinline__ void red_add_f32(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(address), "f"(value)
                 : "memory");
}

/// red.global.add.v4.f32 (sm_90): adds four floats to 16 aligned bytes.
__device__ __forceinline__ void red_add_v4_f32(float* address, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(address),
                 "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

/// ld.acquire.gpu: a load that orders what follows after the release that wrote the value.
__device__ __forceinline__ int ld_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(address) : "memory");
    return value;
}

/// red.release.gpu.add: publishes what this thread wrote or observed before.
__device__ __forceinline__ void red_release_add(int* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(address), "r"(value)
                 : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
