#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// mbarrier.init: a barrier whose phases complete after `count` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

/// fence.mbarrier_init.release.cluster (sm_90): makes initialized barriers known to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

/// mbarrier.arrive.expect_tx (sm_90): one arrival, and the phase waits for `bytes` more to come.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

/// mbarrier.arrive: one arrival. Everything this thread read or wrote before is done.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive.shared::cluster (sm_90): one arrival on a barrier of another CTA of the cluster,
/// whose address comes from mapa. Not .release.cluster, which would wait for every outstanding
/// reduction of the thread (MEMBAR.ALL.GPU): this orders reads of shared memory, no global writes.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t remote_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(remote_barrier) : "memory");
}

/// mbarrier.try_wait.parity (sm_90): true once the phase of this parity has completed. May suspend
/// the thread for a bounded time first, so callers loop. What st.async wrote before the phase
/// completed is visible then; acquiring more, at cluster scope, would empty the L1.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

/// mbarrier.try_wait.parity (sm_90) until the phase of this parity has completed. The loop is part
/// of the assembly: in C++ it would be a branch on which the lanes of a warp might part, and what
/// follows would no longer count as uniform.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "retry:\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "  @p bra done;\n"
        "  bra retry;\n"
        "done:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
