#pragma once

#include <cuda_runtime.h>

namespace flash_attn_norm {
namespace ptx {

/// make_opaque (opaque.cuh) of 16 bytes.
__device__ __forceinline__ void make_opaque(uint4& words) {
    asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
}

}  // namespace ptx
}  // namespace flash_attn_norm
