#pragma once

#include <cuda_runtime_api.h>

#include "attention/bwd_workspace.h"
#include "attention/params.h"

/// What runs before and after the main kernel of the backward pass, whatever its architecture.
namespace flash_attn_norm {

/// Zeroes counters and accumulators, fills lse_log2 and delta, and the sink's partial sums.
void bwd_preprocess(const AttentionBwdParams& params, const BwdPlan& plan, cudaStream_t stream);

/// Turns the sums of the workspace into dq (head split: dk and dv too), ds_aux and the gradient of
/// a bias without rows.
void bwd_postprocess(const AttentionBwdParams& params, const BwdPlan& plan, cudaStream_t stream);

}  // namespace flash_attn_norm
