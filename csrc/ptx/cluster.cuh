#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// %cluster_ctarank (sm_90): this CTA's place in its cluster.
__device__ __forceinline__ uint32_t cluster_cta_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
    return rank;
}

/// %cluster_nctarank (sm_90): how many CTAs the cluster has.
__device__ __forceinline__ uint32_t cluster_num_ctas() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctarank;\n" : "=r"(count));
    return count;
}

/// barrier.cluster.arrive.release (sm_90).
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}

/// barrier.cluster.wait.acquire (sm_90).
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

/// mapa.shared::cluster (sm_90): where CTA `rank` of the cluster has what this CTA has at
/// `shared_address`.
__device__ __forceinline__ uint32_t mapa(uint32_t shared_address, uint32_t rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(shared_address), "r"(rank));
    return remote;
}

/// ld.shared::cluster.u32 (sm_90): a word of a CTA's shared memory, whose address comes from mapa.
__device__ __forceinline__ uint32_t ld_cluster_u32(uint32_t remote_address) {
    uint32_t value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];\n"
                 : "=r"(value)
                 : "r"(remote_address)
                 : "memory");
    return value;
}

/// st.async (sm_90): stores a float in another CTA's shared memory and counts its 4 bytes on the
/// barrier there. Both addresses come from mapa.
__device__ __forceinline__ void st_async(uint32_t remote_address, float value,
                                         uint32_t remote_barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];\n" ::"r"(
            remote_address),
        "f"(value), "r"(remote_barrier)
        : "memory");
}

/// st.shared::cluster.v2.f32 (sm_90): two floats to a CTA's shared memory, whose address, a
/// multiple of 8, comes from mapa. Seen there after a barrier of the cluster.
__device__ __forceinline__ void st_cluster_v2_f32(uint32_t remote_address, float a, float b) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};\n" ::"r"(remote_address), "f"(a), "f"(b)
                 : "memory");
}

/// st.shared::cluster.v4.f32 (sm_90): four floats, to a multiple of 16.
__device__ __forceinline__ void st_cluster_v4_f32(uint32_t remote_address, float4 value) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(remote_address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
