#include "norms/cpu/row_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <type_traits>

#include "norms/cpu/elements.h"

// What follows, and nothing of the headers above, is compiled for AVX-512: an inline function of a
// header that many files share must stay runnable on every x86-64.
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
// GCC 12 takes the undefined operand inside its own intrinsics for a fault of the caller.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace flash_attn_norm {
namespace cpu {
namespace avx512 {

#include "norms/cpu/simd_avx512.h"
// After Simd, which it is written in.
#include "norms/cpu/row_kernels_body.h"

}  // namespace avx512
}  // namespace cpu
}  // namespace flash_attn_norm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
