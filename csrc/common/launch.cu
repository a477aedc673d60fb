#include <stdexcept>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/launch.h"

namespace flash_attn_norm {

namespace {

/// Of every device of this machine. Asking for attributes makes no context.
std::vector<DeviceLimits> read_device_limits() {
    int count = 0;
    FAN_CUDA_CHECK(cudaGetDeviceCount(&count));
    std::vector<DeviceLimits> all(static_cast<size_t>(count));
    for (int device = 0; device < count; ++device) {
        const auto attribute = [&](int& value, cudaDeviceAttr name) {
            FAN_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
        };
        DeviceLimits& limits = all[static_cast<size_t>(device)];
        limits.device = device;
        attribute(limits.capability_major, cudaDevAttrComputeCapabilityMajor);
        attribute(limits.capability_minor, cudaDevAttrComputeCapabilityMinor);
        attribute(limits.num_sms, cudaDevAttrMultiProcessorCount);
        attribute(limits.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        attribute(limits.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
        attribute(limits.threads_per_sm, cudaDevAttrMaxThreadsPerMultiProcessor);
    }
    return all;
}

}  // namespace

const DeviceLimits& current_device_limits() {
    // An exception leaves it unread, and the next call reads it anew.
    static const std::vector<DeviceLimits> all = read_device_limits();
    int device = 0;
    FAN_CUDA_CHECK(cudaGetDevice(&device));
    return all.at(static_cast<size_t>(device));
}

void allow_shared_memory(const void* kernel, int bytes, int device,
                         std::atomic<uint64_t>& allowed) {
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((allowed.load(std::memory_order_acquire) & bit) != 0) return;
    FAN_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed.fetch_or(bit, std::memory_order_release);
}

unsigned grid_size(const char* operation, int64_t ctas) {
    if (ctas > 2147483647) {
        throw std::invalid_argument(std::string(operation) + " needs " + std::to_string(ctas) +
                                    " blocks for this many rows and heads, more than the "
                                    "2147483647 that one launch may have; split the batch");
    }
    return static_cast<unsigned>(ctas);
}

}  // namespace flash_attn_norm
