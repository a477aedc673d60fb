#pragma once

namespace flash_attn_norm {
namespace ptx {

/// No instruction: the compiler must have the pointer in a register here and knows nothing of where
/// it came from.
template <class T>
__device__ __forceinline__ void make_opaque(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}

}  // namespace ptx
}  // namespace flash_attn_norm
