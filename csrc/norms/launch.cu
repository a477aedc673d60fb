#include "norms/launch.cuh"

namespace flash_attn_norm {

int prepare_kernel(const void* kernel, const DeviceLimits& device, KernelLimits& limits) {
    const bool remembers = device.device < kMaxDevices;
    if (remembers) {
        const int known = limits.registers[device.device].load(std::memory_order_relaxed);
        if (known > 0) return known;
    }
    cudaFuncAttributes attributes;
    FAN_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    const int dynamic_bytes =
        device.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    FAN_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes));
    // All of the L1 that can be shared memory, or fewer CTAs than planned may fit at a time.
    FAN_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    if (remembers) {
        limits.registers[device.device].store(attributes.numRegs, std::memory_order_relaxed);
    }
    return attributes.numRegs;
}

namespace {

constexpr int kClusterBits = 16;

/// What decides how many clusters fit, so that it leaves the lowest kClusterBits free.
uint64_t shape_key(const LaunchShape& shape) {
    const uint64_t bytes = static_cast<uint64_t>(shape.shared_bytes);
    const uint64_t threads = static_cast<uint64_t>(shape.threads());
    const uint64_t cluster_size = static_cast<uint64_t>(shape.cluster_size);
    return (((bytes << 11 | threads) << 4) | cluster_size) << kClusterBits;
}

}  // namespace

int max_clusters(const void* kernel, const LaunchShape& shape, const DeviceLimits& device,
                 KernelLimits& limits) {
    const uint64_t key = shape_key(shape);
    const uint64_t place = (key * 0x9e3779b97f4a7c15u >> 32) % KernelLimits::kKnownShapes;
    std::atomic<uint64_t>* known =
        device.device < kMaxDevices ? &limits.clusters[device.device][place] : nullptr;
    const uint64_t found = known != nullptr ? known->load(std::memory_order_relaxed) : 0;
    constexpr uint64_t kClusterMask = (uint64_t{1} << kClusterBits) - 1;
    if ((found & ~kClusterMask) == key) return static_cast<int>(found & kClusterMask);
    int clusters = 0;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(shape.cluster_size * device.num_sms));
    config.blockDim = dim3(shape.threads_per_row, shape.row_slots);
    config.dynamicSmemBytes = shape.shared_bytes;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster_size;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    FAN_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    clusters = clusters > 0 ? clusters : 1;
    if (known != nullptr) known->store(key | clusters, std::memory_order_relaxed);
    return clusters;
}

}  // namespace flash_attn_norm
