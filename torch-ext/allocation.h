#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace flash_attn_norm {

/// A contiguous tensor on the device of `reference`, its contents undefined.
/// torch::stable::new_empty looks torch's op up by its name, which takes the host 0.7 us more for
/// each tensor.
inline torch::stable::Tensor empty_like_device(const torch::stable::Tensor& reference,
                                               const std::vector<int64_t>& shape,
                                               torch::headeronly::ScalarType dtype) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
        strides[dim] = stride;
        stride *= std::max<int64_t>(shape[dim], 1);
    }
    const int32_t dtype_number =
        torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    int32_t device_type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(reference.get(), &device_type));
    AtenTensorHandle tensor = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                 dtype_number, device_type, reference.get_device_index(), &tensor));
    return torch::stable::Tensor(tensor);
}

}  // namespace flash_attn_norm
