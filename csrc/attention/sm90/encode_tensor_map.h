#pragma once

#include <cuda.h>

#include "attention/sm90/tensor_map.h"
#include "common/dtype.h"

namespace flash_attn_norm {
namespace sm90 {

/// The tensor map of `shape` at `data`, bfloat16 or float16. The driver's function is looked up on
/// the first call, so that nothing links against libcuda. Throws std::runtime_error if the driver
/// refuses.
CUtensorMap encode_tensor_map(const TensorMapShape& shape, const void* data, DType dtype);

}  // namespace sm90
}  // namespace flash_attn_norm
