#pragma once

#include <cstdint>

#include "common/cpu_runtime.h"
#include "norms/params.h"

/// All that torch-ext/ sees of the norms. Every function writes every element of its outputs, the
/// weight gradients of zero rows included, and none of its inputs.
namespace flash_attn_norm {

namespace cpu {

int64_t norm_fwd_workspace_bytes(const NormFwdParams& params);
void norm_fwd(const NormFwdParams& params, const CpuRuntime& runtime);

int64_t norm_bwd_workspace_bytes(const NormBwdParams& params);
void norm_bwd(const NormBwdParams& params, const CpuRuntime& runtime);

}  // namespace cpu

namespace cuda {

/// `stream` is a cudaStream_t; the current device is the tensors' own.
int64_t norm_fwd_workspace_bytes(const NormFwdParams& params);
void norm_fwd(const NormFwdParams& params, void* stream);

int64_t norm_bwd_workspace_bytes(const NormBwdParams& params);
void norm_bwd(const NormBwdParams& params, void* stream);

}  // namespace cuda

}  // namespace flash_attn_norm
