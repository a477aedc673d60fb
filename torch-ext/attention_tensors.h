#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "allocation.h"
#include "attention/params.h"

/// How the attention ops allocate, describe and align tensors.
namespace flash_attn_norm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
    return std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end());
}

/// (..., rows, heads, head_dim), packed or dense.
inline TensorStrides strides_of(const Tensor& tensor) {
    const int64_t rank = tensor.dim();
    TensorStrides strides;
    strides.batch = rank == 4 ? tensor.stride(0) : 0;
    strides.row = tensor.stride(rank - 3);
    strides.head = tensor.stride(rank - 2);
    return strides;
}

inline std::vector<int64_t> with_last(const Tensor& tensor, int64_t last) {
    std::vector<int64_t> shape = shape_of(tensor);
    shape.back() = last;
    return shape;
}

inline std::vector<int64_t> lse_shape(const AttentionProblem& problem) {
    if (problem.is_packed()) return {problem.num_heads_q, problem.total_q};
    return {problem.batch_size, problem.num_heads_q, problem.seqlen_q};
}

inline std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
    if (!tensor) return std::nullopt;
    return torch::stable::contiguous(*tensor);
}

constexpr int64_t kVectorElements = 8;  // 16 bytes of a two-byte dtype: one load of a CUDA kernel

inline int64_t padded_head_dim(int64_t head_dim, int64_t vector_elements = kVectorElements) {
    return (head_dim + vector_elements - 1) / vector_elements * vector_elements;
}

inline int64_t vector_elements_of(const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Float8_e4m3fn ? 16 : kVectorElements;
}

/// A CUDA kernel loads rows 16 bytes at a time: whether those of a tensor allow it.
inline bool has_vector_rows(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1, head_dim = tensor.size(last);
    const int64_t elements = vector_elements_of(tensor);
    bool aligned = head_dim == padded_head_dim(head_dim, elements) && tensor.stride(last) == 1 &&
                   reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
    for (int64_t dim = 0; aligned && dim < last; ++dim) {
        aligned = tensor.size(dim) <= 1 || tensor.stride(dim) % elements == 0;
    }
    return aligned;
}

/// Room for a copy whose rows do.
inline Tensor empty_vector_rows(const Tensor& tensor) {
    const int64_t padded =
        padded_head_dim(tensor.size(tensor.dim() - 1), vector_elements_of(tensor));
    return empty_like_device(tensor, with_last(tensor, padded), tensor.scalar_type());
}

/// The copy, its head_dim filled up with zeros, which change no product.
inline void fill_vector_rows(Tensor& copy, const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    const int64_t head_dim = tensor.size(last), padded = copy.size(last);
    Tensor values = torch::stable::narrow(copy, last, 0, head_dim);
    torch::stable::copy_(values, tensor);
    if (padded > head_dim) {
        Tensor filling = torch::stable::narrow(copy, last, head_dim, padded - head_dim);
        torch::stable::zero_(filling);
    }
}

/// The tensor itself if its rows allow it, else the copy.
inline Tensor with_vector_rows(const Tensor& tensor) {
    if (has_vector_rows(tensor)) return tensor;
    Tensor copy = empty_vector_rows(tensor);
    fill_vector_rows(copy, tensor);
    return copy;
}

/// A CUDA kernel copies rows of a bias 16 or 4 bytes at a time; entry by entry a tile would take
/// longer than its products. A bias whose two-byte entries do not allow it is copied once, into
/// rows of whole 16 bytes. So is a single row that ends inside of 16 bytes, which are read as a
/// whole.
inline Tensor with_copyable_rows(const Tensor& bias) {
    if (bias.is_cpu()) return bias;
    const int64_t last = bias.dim() - 1, columns = bias.size(last);
    const int64_t entry_bytes = bias.scalar_type() == ScalarType::Float ? 4 : 2;
    Tensor rows = bias;
    bool copyable = reinterpret_cast<uintptr_t>(bias.const_data_ptr()) % 4 == 0;
    bool single = true;
    for (int64_t dim = 0; dim < last; ++dim) {
        if (rows.size(dim) > 1 && rows.stride(dim) == 0)
            rows = torch::stable::narrow(rows, dim, 0, 1);
        if (rows.size(dim) <= 1) continue;
        single = false;
        copyable = copyable && rows.stride(dim) * entry_bytes % 4 == 0;
    }
    copyable = copyable && !(single && columns * entry_bytes % 16 != 0);
    if (copyable || bias.size(last) == 0) return rows;
    Tensor copy = with_vector_rows(rows);
    return torch::stable::narrow(copy, last, 0, columns);
}

/// The first head_dim columns of a result that was computed with a padded head_dim.
inline Tensor without_padding(Tensor& padded, int64_t head_dim) {
    const int64_t last = padded.dim() - 1;
    if (padded.size(last) == head_dim) return padded;
    return torch::stable::contiguous(torch::stable::narrow(padded, last, 0, head_dim));
}

/// None if no bytes are wanted: an allocation takes the host a few microseconds.
inline std::optional<Tensor> workspace_of(const Tensor& reference, int64_t bytes) {
    if (bytes == 0) return std::nullopt;
    return empty_like_device(reference, {bytes}, ScalarType::Byte);
}

}  // namespace flash_attn_norm
