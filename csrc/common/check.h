#pragma once

#include <cuda_runtime_api.h>

namespace flash_attn_norm {

/// Throws std::runtime_error, with the call's text and CUDA's message, unless `status` is
/// cudaSuccess. A missing kernel image is reported with the device's capability.
void check_cuda(cudaError_t status, const char* call);

/// The same for a kernel launch that has just been made: reads (and clears) the last error.
void check_launch(const char* kernel);

}  // namespace flash_attn_norm

/// Wraps a CUDA runtime call. A macro, so that the message can quote the call.
#define FAN_CUDA_CHECK(call) ::flash_attn_norm::check_cuda((call), #call)
