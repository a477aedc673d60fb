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

int max_clusters(const void* kernel, const LaunchShape& shape, int ctas_per_sm,
                 const DeviceLimits& device, KernelLimits& limits) {
    int size_index = 0;
    while ((1 << size_index) < shape.cluster_size) ++size_index;
    std::atomic<int>* known = device.device < kMaxDevices
                                  ? &limits.clusters[device.device][size_index][ctas_per_sm - 1]
                                  : nullptr;
    int clusters = known != nullptr ? known->load(std::memory_order_relaxed) : 0;
    if (clusters > 0) return clusters;
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
    if (known != nullptr) known->store(clusters, std::memory_order_relaxed);
    return clusters;
}

}  // namespace flash_attn_norm
