#include <cmath>
#include <type_traits>

#include "norms/cpu/elements.h"
#include "norms/cpu/row_kernels.h"

namespace flash_attn_norm {
namespace cpu {
namespace plain {

#include "norms/cpu/simd_plain.h"
// After Simd, which it is written in.
#include "norms/cpu/row_kernels_body.h"

}  // namespace plain
}  // namespace cpu
}  // namespace flash_attn_norm
