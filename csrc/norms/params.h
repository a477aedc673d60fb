#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"

namespace flash_attn_norm {

/// What is rounded, and when (the names are Liger's).
///   kLlama: normalize in float32, round to the dtype of what is normed, multiply by the weight.
///   kGemma: everything in float32, one rounding at the end.
///   kNone: every step, the square included, is rounded to the dtype of what is normed.
enum class CastingMode { kLlama = 0, kGemma = 1, kNone = 2 };

/// Row dimensions that are left after merging those which all tensors step through evenly.
constexpr int kMaxRowDims = 4;

/// The leading dimensions of x, outermost first; one dimension if there are 2^31 rows or more.
struct RowShape {
    int64_t num_rows = 0;
    int num_dims = 1;
    int64_t sizes[kMaxRowDims] = {0};
};

/// Distances in elements between neighbours in each dimension of a RowShape. Columns have unit
/// stride.
struct RowStrides {
    int64_t dims[kMaxRowDims] = {0};
};

/// Offset of a row in a tensor with these strides. More than one dimension only with less than 2^31
/// rows: a 64-bit division takes a GPU some hundred instructions.
FAN_HOST_DEVICE int64_t row_offset(const RowShape& shape, const RowStrides& strides, int64_t row) {
    if (shape.num_dims == 1) return row * strides.dims[0];
    int64_t offset = 0;
    uint32_t rest = static_cast<uint32_t>(row);
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int dim = shape.num_dims - 1; dim > 0; --dim) {
        const uint32_t size = static_cast<uint32_t>(shape.sizes[dim]);
        const uint32_t outer = rest / size;
        offset += static_cast<int64_t>(rest - outer * size) * strides.dims[dim];
        rest = outer;
    }
    return offset + static_cast<int64_t>(rest) * strides.dims[0];
}

/// What both passes need to know.
///
///     sum  = x + residual                    (or x), rounded to sum_dtype
///     xhat = (sum - mean) * rstd             mean = 0 for RMSNorm
///     out  = xhat * (weight + weight_offset) + bias
struct NormProblem {
    RowShape rows;
    int64_t hidden_size = 0;
    float inv_hidden_size = 0.0f;        // 1 / hidden_size, rounded
    DType x_dtype = DType::kBFloat16;    // of x, out, dout and dx
    DType sum_dtype = DType::kBFloat16;  // of what is normed: x_dtype or float32
    DType weight_dtype = DType::kBFloat16;
    const void* weight = nullptr;  // [hidden_size]; null: all ones, and weight_offset counts not
    float weight_offset = 0.0f;
    float eps = 0.0f;
    CastingMode casting_mode = CastingMode::kLlama;
    bool is_layer_norm = false;
};

struct NormFwdParams {
    NormProblem problem;

    const void* x = nullptr;         // [rows, hidden_size]
    const void* residual = nullptr;  // [rows, hidden_size]; null: none
    DType residual_dtype = DType::kBFloat16;
    RowStrides x_strides, residual_strides;

    const void* bias = nullptr;  // [hidden_size]; null: none
    DType bias_dtype = DType::kBFloat16;

    void* out = nullptr;           // [rows, hidden_size], contiguous
    void* residual_out = nullptr;  // [rows, hidden_size] in sum_dtype, contiguous; null: not wanted
    float* mean = nullptr;         // [rows]; LayerNorm only
    float* rstd = nullptr;         // [rows]

    void* workspace = nullptr;  // CPU: norm_fwd_workspace_bytes(params), 64-byte aligned
};

struct NormBwdParams {
    NormProblem problem;

    const void* sum = nullptr;            // [rows, hidden_size] in sum_dtype: what was normed
    const void* dout = nullptr;           // [rows, hidden_size]
    const void* dresidual_out = nullptr;  // [rows, hidden_size] in sum_dtype; null: zero
    RowStrides sum_strides, dout_strides, dresidual_out_strides;
    const float* mean = nullptr;  // [rows], as written by the forward pass; LayerNorm only
    const float* rstd = nullptr;  // [rows]

    void* dx = nullptr;          // [rows, hidden_size], contiguous
    float* dresidual = nullptr;  // [rows, hidden_size], contiguous: dx before it is rounded to
                                 // x_dtype; null: not wanted
    void* dweight = nullptr;     // [hidden_size] in weight_dtype; null: not wanted
    void* dbias = nullptr;       // [hidden_size]; null: not wanted
    DType dbias_dtype = DType::kBFloat16;

    void* workspace = nullptr;  // CPU: norm_bwd_workspace_bytes(params), 64-byte aligned
};

}  // namespace flash_attn_norm
