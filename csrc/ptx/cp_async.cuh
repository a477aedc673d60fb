#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// cp.async.cg, 16 bytes past the L1, with the whole 128-byte line brought to the L2:
/// `source_bytes` (0 to 16) are read, the rest is filled with zeros, so that 0 fills the unit
/// without reading `source`.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source,
                                            int source_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination),
                 "l"(source), "r"(source_bytes)
                 : "memory");
}

/// cp.async.ca, 4 bytes; see cp_async_16.
__device__ __forceinline__ void cp_async_4(uint32_t destination, const void* source,
                                           int source_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(destination), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

/// cp.async.commit_group: closes the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/// cp.async.wait_group: returns when at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
