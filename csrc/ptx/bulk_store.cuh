#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// cp.async.bulk (sm_90), shared to global: both ends 16-byte aligned, `bytes` a multiple of 16.
/// Belongs to this thread's next bulk group.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

/// fence.proxy.async.global (sm_90): orders this thread's ordinary accesses to global memory, and
/// what they have seen, before those of the copy engine. Unlike the fence of all memory it waits
/// for nothing in flight.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
