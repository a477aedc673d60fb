#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "ptx/math.cuh"
#include "ptx/mma_sync.cuh"

namespace flash_attn_norm {

/// The 16-bit element types of the kernels: how to round to them, read them and multiply them.
/// cuda_bf16.h and cuda_fp16.h stay out: they take longer to parse than a kernel to compile.
struct BFloat16 {
    using Storage = uint16_t;
    static constexpr DType kDType = DType::kBFloat16;

    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        return ptx::cvt_rn_bf16x2(low, high);
    }
    static __device__ __forceinline__ float to_float(uint16_t bits) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        ptx::mma_m16n8k16_bf16(d, a, b0, b1);
    }
};

struct Float16 {
    using Storage = uint16_t;
    static constexpr DType kDType = DType::kFloat16;

    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        return ptx::cvt_rn_f16x2(low, high);
    }
    static __device__ __forceinline__ float to_float(uint16_t bits) {
        return ptx::cvt_f32_f16(bits);
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
        ptx::mma_m16n8k16_f16(d, a, b0, b1);
    }
};

/// Element `index` of an array whose type is known at run time only.
__device__ __forceinline__ float load_as_float(const void* array, DType dtype, int64_t index) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(array)[index];
    const uint16_t bits = static_cast<const uint16_t*>(array)[index];
    return dtype == DType::kBFloat16 ? BFloat16::to_float(bits) : Float16::to_float(bits);
}

}  // namespace flash_attn_norm
