#pragma once

#include <cuda_runtime_api.h>

#include "attention/params.h"

namespace flash_attn_norm {
namespace sm90 {

/// True when the Hopper kernels take the call; the portable ones take all others.
bool can_run_fwd(const AttentionFwdParams& params);

/// Bytes of workspace that launch_fwd wants.
constexpr int kFwdWorkspaceBytes = 64;

/// One definition per size class, in fwd_hdim*.cu.
template <int kHeadDim, int kHeadDimV>
void launch_fwd(const AttentionFwdParams& params, int num_sms, cudaStream_t stream);

}  // namespace sm90
}  // namespace flash_attn_norm
