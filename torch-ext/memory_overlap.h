#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace flash_attn_norm {

/// The bytes that a tensor's elements lie in.
class MemoryOf {
  public:
    static constexpr size_t kMaxDims = 8;

    /// Of all elements, or of those with index 0 in the dimensions before `first_dim`.
    explicit MemoryOf(const torch::stable::Tensor& tensor, size_t first_dim = 0);

    /// Whether two elements lie in the same memory, as those of an expanded tensor do.
    bool overlaps_itself() const;

    /// Whether an element lies in memory of one of the other tensor's. Views that only interleave,
    /// as keys and values that alternate in one tensor, share none.
    bool shares(const MemoryOf& other) const { return shares(other, 0, 1); }

    /// Whether it does when both are moved i times, this one by `step` bytes more than the other,
    /// for any i from 0 to count - 1.
    bool shares(const MemoryOf& other, int64_t step, int64_t count) const;

  private:
    struct Dim {
        int64_t stride, last;  // bytes; the last index
    };

    int64_t begin_ = 0;
    int64_t size_ = 0;  // from the first byte to behind the last one; 0 without elements
    int64_t element_size_ = 1;
    bool repeats_ = false;            // a dimension of several entries has stride 0
    std::array<Dim, kMaxDims> dims_;  // of several entries, but for stride 0; strides ascend
    size_t num_dims_ = 0;
};

}  // namespace flash_attn_norm
