#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "attention/cpu/half_types.h"
#include "attention/cpu/tile_engine.h"
#include "common/cpu_target.h"

// From here to the end everything is compiled for AMX. What other files share (standard headers,
// inline functions) stays above: the linker keeps one copy of it, which must run on any machine.
FAN_TARGET_BEGIN("amx-bf16,amx-tile,avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

// clang-format off
#include "attention/cpu/simd_avx512.h"
#include "attention/cpu/operand_bf16.h"
#include "attention/cpu/pack.h"
#include "attention/cpu/gemm_amx.h"
#include "attention/cpu/score_terms.h"
#include "attention/cpu/softmax.h"
#include "attention/cpu/few_rows.h"
#include "attention/cpu/make_engine.h"
// clang-format on

namespace flash_attn_norm {
namespace cpu {

namespace {

constexpr TileEngine make_amx_engine() {
    TileEngine engine = make_engine<Bf16Operand>("amx_bf16", gemm_amx, 128, 512, 128, 128);
    engine.enter = enter_amx;
    engine.leave = leave_amx;
    return engine;
}

}  // namespace

const TileEngine kAmxEngine = make_amx_engine();

}  // namespace cpu
}  // namespace flash_attn_norm

FAN_TARGET_END

#endif  // __x86_64__
