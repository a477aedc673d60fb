#include <cstdint>
#include <cstring>

#include "attention/cpu/half_types.h"
#include "attention/cpu/tile_engine.h"

// In this order, each uses those before it; see engine_avx512.cpp.
// clang-format off
#include "attention/cpu/simd_plain.h"
#include "attention/cpu/operand.h"
#include "attention/cpu/pack.h"
#include "attention/cpu/gemm_f32.h"
#include "attention/cpu/score_terms.h"
#include "attention/cpu/softmax.h"
#include "attention/cpu/few_rows.h"
#include "attention/cpu/make_engine.h"
// clang-format on

namespace flash_attn_norm {
namespace cpu {

const TileEngine kPlainEngine =
    make_engine<FloatOperand<PlainSimd>>("plain", gemm_f32<PlainSimd, 4, 2>, 64, 128, 64, 128);

}  // namespace cpu
}  // namespace flash_attn_norm
