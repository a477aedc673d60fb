#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention/bwd_workspace.h"
#include "attention/params.h"
#include "common/check.h"

namespace flash_attn_norm {
namespace sm80 {

/// What a launcher needs to know of the current device.
struct DeviceLimits {
    int device = 0;
    int capability_major = 0;
    int capability_minor = 0;
    int shared_per_block = 0;  // bytes, opted in
    int shared_per_sm = 0;
    int num_sms = 0;
};

/// Those of the current device; refuses a card that no kernel runs on.
const DeviceLimits& current_device_limits();

constexpr int kReservedShared = 1024;  // bytes of each CTA that CUDA keeps for itself

/// Lets `kernel` have all of a block's shared memory. `allowed` is the kernel's own: a bit for each
/// device that knows, for the call takes CUDA's lock.
inline void allow_shared_memory(const void* kernel, const DeviceLimits& device,
                                std::atomic<uint64_t>& allowed) {
    const uint64_t bit = device.device < 64 ? uint64_t{1} << device.device : 0;
    if ((allowed.load(std::memory_order_acquire) & bit) != 0) return;
    FAN_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        device.shared_per_block));
    allowed.fetch_or(bit, std::memory_order_release);
}

inline unsigned grid_size(int64_t ctas) {
    if (ctas > 2147483647) {
        throw std::invalid_argument(
            "attention needs " + std::to_string(ctas) +
            " blocks for this many rows and heads, more than the 2147483647 "
            "that one launch may have; split the batch");
    }
    return static_cast<unsigned>(ctas);
}

/// False when the scores are softmax_scale * q . k and nothing is dropped: masks alone do not need
/// the kernels that hold the code of all terms.
inline bool needs_general_kernel(const AttentionProblem& problem) {
    return problem.softcap > 0.0f || problem.alibi_slopes != nullptr ||
           problem.attn_bias != nullptr || problem.dropout_p > 0.0f ||
           !(problem.softmax_scale > 0.0f);
}

/// One definition per size class, in fwd_hdim*.cu and bwd_hdim*.cu.
template <int kHeadDim, int kHeadDimV>
void launch_fwd(const AttentionFwdParams& params, const DeviceLimits& device, cudaStream_t stream);

/// kSmall: the tiles for cards with less than kLargeShared bytes of shared memory per block.
constexpr int kLargeShared = 163 * 1024;

template <int kHeadDim, int kHeadDimV, bool kSmall>
BwdPlan plan_bwd(const AttentionBwdParams& params, const DeviceLimits& device);
template <int kHeadDim, int kHeadDimV, bool kSmall>
void launch_bwd(const AttentionBwdParams& params, const BwdPlan& plan, const DeviceLimits& device,
                cudaStream_t stream);

}  // namespace sm80
}  // namespace flash_attn_norm
