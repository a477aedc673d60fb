#pragma once

#include <cstdint>

#include "attention/cpu/tile_engine.h"
#include "attention/params.h"
#include "common/cpu_runtime.h"

namespace flash_attn_norm {
namespace cpu {

/// Of each worker; 0 if needs_delta_correction(params) is false.
int64_t exact_delta_scratch_bytes(const AttentionBwdParams& params, const TileEngine& engine);

/// delta before dsoftmax_lse is taken off, laid out like softmax_lse: sum_j P_j dP_j of rows that
/// delta_correction.h names, with dP as `engine` computes it, else dout . out. Rows that no
/// sequence covers are not written.
void exact_delta(const AttentionBwdParams& params, const TileEngine& engine,
                 const CpuRuntime& runtime, float* delta, char* worker_memory,
                 int64_t worker_bytes);

}  // namespace cpu
}  // namespace flash_attn_norm
