#pragma once

namespace flash_attn_norm {
namespace ptx {

/// atom.acquire.gpu.cas: writes `value` where `expected` stands and returns what stood there. What
/// follows is ordered after the release that wrote it.
__device__ __forceinline__ int atom_acquire_cas(int* address, int expected, int value) {
    int old;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;\n"
                 : "=r"(old)
                 : "l"(address), "r"(expected), "r"(value)
                 : "memory");
    return old;
}

/// atom.relaxed.gpu.cas: the same without the order, so that nothing waits for the result before it
/// is used.
__device__ __forceinline__ int atom_relaxed_cas(int* address, int expected, int value) {
    int old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;\n"
                 : "=r"(old)
                 : "l"(address), "r"(expected), "r"(value)
                 : "memory");
    return old;
}

/// atom.acq_rel.gpu.add: adds `value` and returns what stood there. Publishes what came before and
/// orders what follows after what others published so.
__device__ __forceinline__ int atom_acq_rel_add(int* address, int value) {
    int old;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;\n"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}

}  // namespace ptx
}  // namespace flash_attn_norm
