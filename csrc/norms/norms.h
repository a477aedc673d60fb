#pragma once

#include <cstdint>
#include <functional>

#include "common/cpu_runtime.h"
#include "norms/params.h"

/// All that torch-ext/ sees of the norms. Every function writes every element of its outputs, the
/// weight gradients of zero rows included, and none of its inputs.
namespace flash_attn_norm {

/// Gives so many bytes, 64-byte aligned, for the work that the call puts on its stream.
using Allocator = std::function<void*(int64_t bytes)>;

namespace cpu {

int64_t norm_fwd_workspace_bytes(const NormFwdParams& params);
void norm_fwd(const NormFwdParams& params, const CpuRuntime& runtime);

int64_t norm_bwd_workspace_bytes(const NormBwdParams& params);
void norm_bwd(const NormBwdParams& params, const CpuRuntime& runtime);

}  // namespace cpu

namespace cuda {

/// `stream` is a cudaStream_t; the current device is the tensors' own.
void norm_fwd(const NormFwdParams& params, void* stream);

/// Asks once for its workspace, whose size comes with the plan of its launches.
void norm_bwd(const NormBwdParams& params, const Allocator& allocate, void* stream);

}  // namespace cuda

}  // namespace flash_attn_norm
