#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "attention/cpu/half_types.h"
#include "attention/cpu/tile_engine.h"
#include "common/cpu_target.h"

// From here to the end everything is compiled for AVX-512 BF16. What other files share (standard
// headers, inline functions) stays above: the linker keeps one copy of it, which must run on any
// machine.
FAN_TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

// clang-format off
#include "attention/cpu/simd_avx512.h"
#include "attention/cpu/operand_bf16.h"
#include "attention/cpu/pack.h"
#include "attention/cpu/gemm_bf16.h"
#include "attention/cpu/score_terms.h"
#include "attention/cpu/softmax.h"
#include "attention/cpu/few_rows.h"
#include "attention/cpu/make_engine.h"
// clang-format on

namespace flash_attn_norm {
namespace cpu {

const TileEngine kAvx512Bf16Engine =
    make_engine<Bf16Operand>("avx512_bf16", gemm_bf16, 64, 256, 128, 128);

}  // namespace cpu
}  // namespace flash_attn_norm

FAN_TARGET_END

#endif  // __x86_64__
