#pragma once

#include <cstdint>

#include "attention_checks.h"

namespace flash_attn_norm {

/// Refuses cu_seqlens_q and cu_seqlens_k of another dtype, shape or layout than the kernels read.
void check_index_tensors(const AttentionArguments& arguments);

/// Refuses values that are no running sums within total_q and total_k rows: always on the CPU; on a
/// GPU, where it costs a synchronisation, if `arguments` ask for it.
void check_index_values(const AttentionArguments& arguments, int64_t total_q, int64_t total_k);

}  // namespace flash_attn_norm
