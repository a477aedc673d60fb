#pragma once

#include "attention/element.cuh"

namespace flash_attn_norm {

/// The sum of squares of `units` times 8 elements, which kThreads neighbours add up together and
/// all of them get; every thread of their warp must call.
template <class Element, int kThreads>
__device__ __forceinline__ float row_squares(const uint16_t* row, int units) {
    float squares = 0.0f;
    for (int i = static_cast<int>(threadIdx.x) % kThreads; i < units; i += kThreads) {
        const uint4 values = reinterpret_cast<const uint4*>(row)[i];
        const uint32_t* pairs = &values.x;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float low = Element::to_float(static_cast<uint16_t>(pairs[pair]));
            const float high = Element::to_float(static_cast<uint16_t>(pairs[pair] >> 16));
            squares = fmaf(low, low, fmaf(high, high, squares));
        }
    }
#pragma unroll
    for (int offset = 1; offset < kThreads; offset *= 2) {
        squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    }
    return squares;
}

}  // namespace flash_attn_norm
