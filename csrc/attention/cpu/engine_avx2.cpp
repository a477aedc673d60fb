#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "attention/cpu/half_types.h"
#include "attention/cpu/tile_engine.h"
#include "common/cpu_target.h"

// From here to the end everything is compiled for AVX2. What other files share (standard headers,
// inline functions) stays above: the linker keeps one copy of it, which must run on any machine.
FAN_TARGET_BEGIN("avx2,fma,f16c")

// clang-format off
#include "attention/cpu/simd_avx2.h"
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

const TileEngine kAvx2Engine =
    make_engine<FloatOperand<Avx2Simd>>("avx2", gemm_f32<Avx2Simd, 6, 2>, 64, 128, 64, 128);

}  // namespace cpu
}  // namespace flash_attn_norm

FAN_TARGET_END

#endif  // __x86_64__
