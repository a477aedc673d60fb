#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "norms/params.h"

namespace flash_attn_norm {

/// True for null too.
inline bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/// True if each row of the tensor starts at a multiple of 16 bytes, or there is no tensor.
inline bool is_aligned(const void* pointer, DType dtype, const RowShape& shape,
                       const RowStrides& strides) {
    if (pointer == nullptr) return true;
    if (!is_aligned(pointer)) return false;
    for (int dim = 0; dim < shape.num_dims; ++dim) {
        if (shape.sizes[dim] > 1 && strides.dims[dim] * size_of(dtype) % 16 != 0) return false;
    }
    return true;
}

}  // namespace flash_attn_norm
