#pragma once

#include <cstdint>

#include "attention_checks.h"

namespace flash_attn_norm {

/// Refuses cu_seqlens_q and cu_seqlens_k of another dtype, shape or layout than the kernels read.
void check_index_tensors(const AttentionArguments& arguments);

/// Refuses values that are no running sums within total_q and total_k rows: always on the CPU; on a
/// GPU, where it costs a synchronisation, if `arguments` ask for it.
void check_index_values(const AttentionArguments& arguments, int64_t total_q, int64_t total_k);

/// The same of one tensor, cu_seqlens_q or cu_seqlens_k, and of its `count` values; gives the
/// longest sequence.
void check_index_tensor(const char* name, const Tensor& tensor);
int64_t check_cumulative(const char* name, const int32_t* values, int64_t count,
                         const char* rows_name, int64_t rows);

}  // namespace flash_attn_norm
