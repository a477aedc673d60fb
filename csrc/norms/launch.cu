#include <algorithm>

#include "norms/launch.cuh"

namespace flash_attn_norm {

namespace {

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    FAN_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}

DeviceLimits read_limits(int device) {
    DeviceLimits limits;
    limits.index = device;
    limits.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
    limits.shared_bytes_per_cta = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    limits.shared_bytes_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    limits.threads_per_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
    limits.capability_major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    return limits;
}

}  // namespace

const DeviceLimits& current_device_limits() {
    // Written before its flag is; two threads that come first write the same.
    static DeviceLimits limits[kMaxDevices];
    static std::atomic<bool> known[kMaxDevices];
    int device = 0;
    FAN_CUDA_CHECK(cudaGetDevice(&device));
    device = std::min(device, kMaxDevices - 1);
    if (!known[device].load(std::memory_order_acquire)) {
        static std::atomic_flag writing = ATOMIC_FLAG_INIT;
        while (writing.test_and_set(std::memory_order_acquire)) {
        }
        limits[device] = read_limits(device);
        writing.clear(std::memory_order_release);
        known[device].store(true, std::memory_order_release);
    }
    return limits[device];
}

int prepare_kernel(const void* kernel, const DeviceLimits& device, KernelLimits& limits) {
    const int registers = limits.registers[device.index].load(std::memory_order_relaxed);
    if (registers > 0) return registers;
    cudaFuncAttributes attributes;
    FAN_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    const int dynamic_bytes =
        device.shared_bytes_per_cta - static_cast<int>(attributes.sharedSizeBytes);
    FAN_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic_bytes));
    // All of the L1 that can be shared memory, or fewer CTAs than planned may fit at a time.
    FAN_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    limits.registers[device.index].store(attributes.numRegs, std::memory_order_relaxed);
    return attributes.numRegs;
}

int max_clusters(const void* kernel, const LaunchShape& shape, int ctas_per_sm,
                 const DeviceLimits& device, KernelLimits& limits) {
    int size_index = 0;
    while ((1 << size_index) < shape.cluster_size) ++size_index;
    std::atomic<int>& known = limits.clusters[device.index][size_index][ctas_per_sm - 1];
    int clusters = known.load(std::memory_order_relaxed);
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
    known.store(clusters, std::memory_order_relaxed);
    return clusters;
}

}  // namespace flash_attn_norm
