#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/check.h"
#include "common/launch.h"
#include "norms/arch.h"

namespace flash_attn_norm {

struct LaunchShape {
    int64_t num_ctas = 1;  // a multiple of cluster_size
    int threads_per_row = 32;
    int row_slots = 1;
    int cluster_size = 1;
    int shared_bytes = 0;

    int threads() const { return threads_per_row * row_slots; }
};

/// Threads for a row of this many packs or columns: a power of two below 32, a multiple of 32 up
/// to max_threads above.
inline int threads_for_row(int64_t num_items, int items_per_thread, int max_threads) {
    const int64_t threads = (num_items + items_per_thread - 1) / items_per_thread;
    if (threads > 32) {
        const int64_t rounded = (threads + 31) / 32 * 32;
        return static_cast<int>(rounded < max_threads ? rounded : max_threads);
    }
    int power = 1;
    while (power < threads) power *= 2;
    return power;
}

/// Rows that share a CTA, so that it has whole warps, about `threads` of them.
inline int row_slots_for(int threads_per_row, int threads) {
    return threads_per_row >= threads ? 1 : threads / threads_per_row;
}

/// Launches kernel(params). On Sm90 as a programmatically dependent launch: the kernel waits
/// itself for those before it, so that its start overlaps with their end.
template <class Arch, typename Params>
void launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params,
            const char* name, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid_size(name, shape.num_ctas));
    config.blockDim = dim3(shape.threads_per_row, shape.row_slots);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attributes[2];
    if constexpr (Arch::kHasGridDependency) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        ++config.numAttrs;
    }
    if (shape.cluster_size > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim.x = shape.cluster_size;
        attributes[config.numAttrs].val.clusterDim.y = 1;
        attributes[config.numAttrs].val.clusterDim.z = 1;
        ++config.numAttrs;
    }
    config.attrs = attributes;
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

constexpr int kMaxCtasPerSm = 4;

constexpr int kMaxDevices = 64;

/// What is known of a kernel on each device, but for those from kMaxDevices on, which ask CUDA each
/// time. It belongs to the kernel and starts with zeros.
struct KernelLimits {
    std::atomic<int> registers[kMaxDevices];
    // Of the launch shapes asked for last: a shape and how many of its clusters run at a time, in
    // one word, see max_clusters.
    static constexpr int kKnownShapes = 16;
    std::atomic<uint64_t> clusters[kMaxDevices][kKnownShapes];
};

/// Allows the kernel all the shared memory that a CTA can have, once for each device, and gives
/// its registers per thread.
int prepare_kernel(const void* kernel, const DeviceLimits& device, KernelLimits& limits);

/// How many clusters of this shape run at a time: fewer than the multiprocessors would give,
/// because a cluster stays within a part of the device.
int max_clusters(const void* kernel, const LaunchShape& shape, const DeviceLimits& device,
                 KernelLimits& limits);

}  // namespace flash_attn_norm
