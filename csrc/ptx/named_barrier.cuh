#pragma once

namespace flash_attn_norm {
namespace ptx {

/// bar.sync: waits until `num_threads` threads (whole warps) have arrived at barrier `id`, 0 to 15;
/// 0 is __syncthreads().
__device__ __forceinline__ void bar_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

/// bar.arrive: counts this warp at barrier `id` and goes on.
__device__ __forceinline__ void bar_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
