#pragma once

#include <cstdint>

namespace flash_attn_norm {

/// The sum over aligned groups of `width` lanes (a power of two up to 32), in every lane. All 32
/// lanes of the warp must call it. The order of additions is fixed.
__device__ __forceinline__ float group_sum(float value, int width) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

}  // namespace flash_attn_norm
