#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

namespace flash_attn_norm {

/// Makes a tensor's CUDA device the current one for as long as it lives, and knows torch's current
/// stream there.
class CudaContext {
  public:
    explicit CudaContext(const torch::stable::Tensor& tensor) : guard_(tensor.get_device_index()) {
        TORCH_ERROR_CODE_CHECK(
            aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
    }

    void* stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_ = nullptr;  // a cudaStream_t
};

}  // namespace flash_attn_norm
