#pragma once

#include <torch/csrc/stable/tensor.h>

namespace flash_attn_norm {

/// Whether two elements of a tensor lie in the same memory, as those of an expanded one do.
bool overlaps_itself(const torch::stable::Tensor& tensor);

/// Whether an element of one tensor lies in memory of an element of the other. Views that only
/// interleave, as keys and values that alternate in one tensor, do not share any.
bool shares_memory(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

}  // namespace flash_attn_norm
