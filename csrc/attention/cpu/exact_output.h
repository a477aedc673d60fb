#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/cpu_runtime.h"

namespace flash_attn_norm {
namespace cpu {

/// Of each worker; 0 if needs_delta_correction(params) is false.
int64_t exact_output_scratch_bytes(const AttentionBwdParams& params, const CpuRuntime& runtime);

/// The output before it was rounded, like params.out; an element of it that does not round to the
/// stored one is the stored one. softmax_lse: space for it. Rows that no sequence covers are not
/// written.
void exact_output(const AttentionBwdParams& params, const CpuRuntime& runtime, float* out,
                  float* softmax_lse, char* worker_memory, int64_t worker_bytes);

}  // namespace cpu
}  // namespace flash_attn_norm
