#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

/// What every launcher needs to know, and to ask for.
namespace flash_attn_norm {

struct DeviceLimits {
    int device = 0;
    int capability_major = 0;
    int capability_minor = 0;
    int num_sms = 0;
    int shared_per_block = 0;  // bytes, opted in
    int shared_per_sm = 0;
    int threads_per_sm = 0;
};

/// Those of the current device; every device is read once.
const DeviceLimits& current_device_limits();

constexpr int kReservedShared = 1024;  // bytes of each CTA that CUDA keeps for itself

/// Lets `kernel` have `bytes` of shared memory, of which more than 48 KB must be asked for.
/// `allowed` is the kernel's own: a bit for each of the first 64 devices that knows, for the call
/// takes CUDA's lock.
void allow_shared_memory(const void* kernel, int bytes, int device, std::atomic<uint64_t>& allowed);

/// The number of CTAs of a launch; refuses what exceeds a grid. `operation` names it in the error.
unsigned grid_size(const char* operation, int64_t ctas);

}  // namespace flash_attn_norm
