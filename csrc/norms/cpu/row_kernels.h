#pragma once

#include <cstdint>

#include "norms/params.h"

namespace flash_attn_norm {
namespace cpu {

/// The rows [row_begin, row_end) of a pass, for one instruction set. `weight` and `bias` are
/// [hidden_size] in float32, the weight's offset included.
struct RowKernels {
    void (*norm_fwd)(const NormFwdParams& params, const float* weight, const float* bias,
                     int64_t row_begin, int64_t row_end);
    /// Adds to dweight and dbias, [hidden_size] each; null: not wanted.
    void (*norm_bwd)(const NormBwdParams& params, const float* weight, int64_t row_begin,
                     int64_t row_end, float* dweight, float* dbias);
};

namespace plain {
extern const RowKernels kRowKernels;
}

#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kRowKernels;
}
namespace avx512 {
extern const RowKernels kRowKernels;
}
#endif

}  // namespace cpu
}  // namespace flash_attn_norm
