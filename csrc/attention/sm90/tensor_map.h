#pragma once

#include <cstdint>

#include "attention/params.h"
#include "attention/sm90/tile_layout.h"

namespace flash_attn_norm {
namespace sm90 {

/// What the copy engine is told of a tensor [batch][row][head][column] of two-byte elements. Its
/// dimensions are ordered column, row, head, batch, and a copy moves box_columns x box_rows
/// elements of one head and batch entry. Plain numbers, so that they can be tested without a GPU.
struct TensorMapShape {
    uint64_t sizes[4] = {1, 1, 1, 1};      // column, row, head, batch
    uint64_t stride_bytes[3] = {0, 0, 0};  // row, head, batch
    uint32_t box_columns = 0;
    uint32_t box_rows = 0;
    Swizzle swizzle = Swizzle::k128Bytes;
};

/// The tensor behind one operand of attention.
struct TensorShape {
    int64_t batch_size = 1;  // 1 for packed rows
    int64_t rows = 0;        // of a batch entry; all of them when packed
    int64_t heads = 0;
    int64_t head_dim = 0;
};

inline TensorShape query_shape(const AttentionProblem& problem, int64_t head_dim) {
    return problem.is_packed()
               ? TensorShape{1, problem.total_q, problem.num_heads_q, head_dim}
               : TensorShape{problem.batch_size, problem.seqlen_q, problem.num_heads_q, head_dim};
}

inline TensorShape key_shape(const AttentionProblem& problem, int64_t head_dim) {
    return problem.is_packed()
               ? TensorShape{1, problem.total_k, problem.num_heads_kv, head_dim}
               : TensorShape{problem.batch_size, problem.seqlen_k, problem.num_heads_kv, head_dim};
}

/// Strides of a contiguous [batch][row][head][column].
inline TensorStrides contiguous_strides(const TensorShape& shape) {
    TensorStrides strides;
    strides.head = shape.head_dim;
    strides.row = shape.heads * shape.head_dim;
    strides.batch = shape.rows * strides.row;
    return strides;
}

/// True when a tensor map can describe the tensor (cuTensorMapEncodeTiled, driver API): a base and
/// strides of whole 16 bytes, below 2^40; 0, that of an expanded dimension, is one of them. A
/// dimension of size 1 may have any stride, for it is never used.
inline bool can_map_tensor(const TensorShape& shape, const TensorStrides& strides,
                           const void* data) {
    const auto fits = [](int64_t size, int64_t stride) {
        return size <= 1 || (stride >= 0 && stride % 8 == 0 && stride < (int64_t{1} << 39));
    };
    const int64_t largest = int64_t{1} << 31;  // coordinates are signed 32-bit numbers
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && shape.head_dim % 8 == 0 &&
           shape.rows < largest && shape.batch_size < largest && shape.heads < largest &&
           fits(shape.rows, strides.row) && fits(shape.heads, strides.head) &&
           fits(shape.batch_size, strides.batch);
}

/// The map whose boxes are tiles of TileLayout<..., kColumns>, one chunk each. Needs
/// can_map_tensor(). Columns past head_dim lie outside the tensor and arrive as zeros.
template <int kColumns>
TensorMapShape tensor_map_shape(const TensorShape& shape, const TensorStrides& strides,
                                int box_rows) {
    using Layout = TileLayout<8, kColumns>;
    TensorMapShape map;
    const int64_t sizes[4] = {shape.head_dim, shape.rows, shape.heads, shape.batch_size};
    const int64_t elements[3] = {strides.row, strides.head, strides.batch};
    for (int i = 0; i < 4; ++i) map.sizes[i] = static_cast<uint64_t>(sizes[i] > 0 ? sizes[i] : 1);
    for (int i = 0; i < 3; ++i) {
        map.stride_bytes[i] = sizes[i + 1] > 1 ? static_cast<uint64_t>(elements[i]) * 2 : 16;
    }
    map.box_columns = Layout::kChunkColumns;
    map.box_rows = static_cast<uint32_t>(box_rows);
    map.swizzle = Layout::kSwizzle;
    return map;
}

}  // namespace sm90
}  // namespace flash_attn_norm
