#pragma once

#include <cuda_runtime_api.h>

#include "attention/bwd_workspace.h"
#include "attention/params.h"
#include "common/launch.h"

namespace flash_attn_norm {
namespace sm80 {

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
