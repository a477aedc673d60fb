#include "attention/cpu/tile_engine.h"
#include "common/cpu_features.h"

namespace flash_attn_norm {
namespace cpu {

const TileEngine& select_engine(DType dtype) {
#if defined(__x86_64__)
    const CpuIsa isa = cpu_isa();
    if (dtype == DType::kBFloat16 && isa >= CpuIsa::kAmxBf16) return kAmxEngine;
    if (dtype == DType::kBFloat16 && isa >= CpuIsa::kAvx512Bf16) return kAvx512Bf16Engine;
    if (isa >= CpuIsa::kAvx512) return kAvx512Engine;
    if (isa >= CpuIsa::kAvx2) return kAvx2Engine;
#endif
    (void)dtype;
    return kPlainEngine;
}

}  // namespace cpu
}  // namespace flash_attn_norm
