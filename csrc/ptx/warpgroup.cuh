#pragma once

#include <cstdint>

namespace flash_attn_norm {
namespace ptx {

/// setmaxnreg.inc (sm_90a): gives each thread of this warpgroup kRegisters registers (a multiple of
/// 8, 24 to 256), once others have given up enough. Executed by all four warps.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

/// setmaxnreg.dec (sm_90a): keeps kRegisters registers per thread and gives the others back.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace ptx
}  // namespace flash_attn_norm
