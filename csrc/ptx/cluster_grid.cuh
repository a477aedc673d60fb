#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// %clusterid (sm_90): which cluster of the grid this CTA is in, in x. Without clusters,
/// blockIdx.x.
__device__ __forceinline__ int cluster_id() {
    uint32_t id;
    asm("mov.u32 %0, %%clusterid.x;\n" : "=r"(id));
    return static_cast<int>(id);
}

/// %nclusterid (sm_90): how many clusters the grid has, in x.
__device__ __forceinline__ int num_clusters() {
    uint32_t count;
    asm("mov.u32 %0, %%nclusterid.x;\n" : "=r"(count));
    return static_cast<int>(count);
}

/// barrier.cluster.arrive.relaxed (sm_90): orders nothing but what a fence before it does.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}

}  // namespace ptx
}  // namespace flash_attn_norm
