#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "common/check.h"

namespace flash_attn_norm {

/// Makes a tensor's CUDA device the current one for as long as it lives, and knows torch's current
/// stream there.
class [[gnu::visibility("hidden")]] CudaContext {
  public:
    explicit CudaContext(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
        TORCH_ERROR_CODE_CHECK(
            aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
    }

    void* stream() const { return stream_; }

    /// Whether the stream's work is being recorded in a CUDA graph, so that nothing may wait for
    /// it.
    bool is_capturing() const {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        FAN_CUDA_CHECK(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream_), &status));
        return status != cudaStreamCaptureStatusNone;
    }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_ = nullptr;  // a cudaStream_t
};

}  // namespace flash_attn_norm
