#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// prefetch.tensormap (sm_90): brings a tensor map, a kernel parameter, near the copy engine.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

/// What the L2 should do with the lines that a copy touches (createpolicy.fractional.L2).
enum class L2Hint { kNormal, kEvictFirst, kEvictLast };

/// cp.async.bulk.tensor.4d (sm_90): copies the map's box at these coordinates, innermost dimension
/// first, to shared memory, and counts its bytes on `barrier`. Elements outside the tensor arrive
/// as zeros and count as well.
template <L2Hint kHint = L2Hint::kNormal>
__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap* map,
                                            uint32_t barrier, int c0, int c1, int c2, int c3) {
    if constexpr (kHint == L2Hint::kNormal) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(destination),
            "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
            : "memory");
    } else {
        uint64_t policy;
        if constexpr (kHint == L2Hint::kEvictFirst) {
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
        } else {
            asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
        }
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(destination),
            "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
            : "memory");
    }
}

/// cp.async.bulk.tensor.4d (sm_90), shared to global: elements outside the tensor are not written.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t source, int c0,
                                             int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];\n" ::"l"(map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

/// cp.async.bulk (sm_90), global to shared: both ends 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

/// cp.async.bulk (sm_90), this CTA's shared memory to another one's: `remote_destination` and
/// `remote_barrier` come from mapa.
__device__ __forceinline__ void bulk_copy_to_cta(uint32_t remote_destination, uint32_t source,
                                                 uint32_t bytes, uint32_t remote_barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(remote_destination),
        "r"(source), "r"(bytes), "r"(remote_barrier)
        : "memory");
}

/// cp.reduce.async.bulk.add.f32 (sm_90): adds `bytes` of floats in shared memory to global memory.
__device__ __forceinline__ void bulk_reduce_add_f32(float* destination, uint32_t source,
                                                    uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(
            destination),
        "r"(source), "r"(bytes)
        : "memory");
}

/// cp.async.bulk.commit_group (sm_90): closes the group of this thread's bulk stores.
__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

/// cp.async.bulk.wait_group.read (sm_90): returns when all but kPending of this thread's newest
/// groups have read their shared memory, which may be written again.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}

/// cp.async.bulk.wait_group (sm_90): returns when all but kPending of this thread's newest groups
/// are complete, and what they wrote can be seen by this thread.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// fence.proxy.async (sm_90) for all of memory: orders this thread's ordinary accesses and those of
/// the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;\n" ::: "memory");
}

/// fence.proxy.async (sm_90): what this thread wrote to shared memory by ordinary stores is seen by
/// the copy engine and by wgmma, once the threads have also met at a barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
