#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// createpolicy.fractional.L2::evict_last (sm_80): for loads whose lines shall leave the L2 after
/// all others.
__device__ __forceinline__ uint64_t l2_evict_last() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
    return policy;
}

/// ld.global with a policy for the L2, 16 bytes if `is_inside`, else zeros: a predicate, not a
/// branch, behind which the next load would wait for this one.
__device__ __forceinline__ uint4 ld_global_if(const void* address, bool is_inside,
                                              uint64_t l2_policy) {
    uint4 value = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  setp.ne.u32 p, %6, 0;\n"
        "  @p ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n"
        "}\n"
        : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
        : "l"(address), "l"(l2_policy), "r"(static_cast<uint32_t>(is_inside)));
    return value;
}

/// ld.global.L1::evict_last with a policy for the L2, 16 bytes: for data that this CTA reads again.
__device__ __forceinline__ uint4 ld_global_evict_last(const void* address, uint64_t l2_policy) {
    uint4 value;
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address), "l"(l2_policy));
    return value;
}

/// ld.global.L1::evict_first, 16 bytes: for data that this CTA does not read again.
__device__ __forceinline__ uint4 ld_global_evict_first(const void* address) {
    uint4 value;
    asm volatile("ld.global.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

}  // namespace ptx
}  // namespace flash_attn_norm
