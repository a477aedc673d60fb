#pragma once

namespace flash_attn_norm {
namespace ptx {

/// No instruction: the compiler must have the pointer in a register here and knows nothing of where
/// it came from.
template <class T>
__device__ __forceinline__ void make_opaque(T*& pointer) {
    asm volatile("" : "+l"(pointer));
}

/// The same for a number: what is computed from it is computed here, not ahead of a loop around it,
/// where it would take registers all the while.
__device__ __forceinline__ void make_opaque(int& value) {
    asm volatile("" : "+r"(value));
}

}  // namespace ptx
}  // namespace flash_attn_norm
