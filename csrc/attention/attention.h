#pragma once

#include <cstdint>

#include "attention/params.h"
#include "common/cpu_runtime.h"

/// All that torch-ext/ sees of attention. Every function writes every element of its outputs: rows
/// that see no key, rows that no sequence covers and tensors of empty sequences included.
namespace flash_attn_norm {

namespace cpu {

int64_t attention_fwd_workspace_bytes(const AttentionFwdParams& params, const CpuRuntime& runtime);
void attention_fwd(const AttentionFwdParams& params, const CpuRuntime& runtime);

int64_t attention_bwd_workspace_bytes(const AttentionBwdParams& params, const CpuRuntime& runtime);
void attention_bwd(const AttentionBwdParams& params, const CpuRuntime& runtime);

void kvcache_append(const KvCacheAppendParams& params, const CpuRuntime& runtime);

int64_t attention_kvcache_workspace_bytes(const KvCacheAttentionParams& params,
                                          const CpuRuntime& runtime);
void attention_kvcache(const KvCacheAttentionParams& params, const CpuRuntime& runtime);

}  // namespace cpu

namespace cuda {

/// `stream` is a cudaStream_t; the current device is the tensors' own.
int64_t attention_fwd_workspace_bytes(const AttentionFwdParams& params);
void attention_fwd(const AttentionFwdParams& params, void* stream);

int64_t attention_bwd_workspace_bytes(const AttentionBwdParams& params);
void attention_bwd(const AttentionBwdParams& params, void* stream);

/// What params.dattn_bias must have: the dtype of the bias where each entry is written once, else
/// float32. problem and dattn_bias_strides must be set.
DType bias_gradient_dtype(const AttentionBwdParams& params);

/// Rows of k, v, q and the cache may begin at any address and have any head_dim.
void kvcache_append(const KvCacheAppendParams& params, void* stream);

/// Rows of q and the cache begin at multiples of 16 bytes; head_dim and head_dim_v are multiples of
/// 8. The workspace, like the grid, depends on shapes alone, never on lengths.
int64_t attention_kvcache_workspace_bytes(const KvCacheAttentionParams& params);
void attention_kvcache(const KvCacheAttentionParams& params, void* stream);

/// The number of splits that such a call chooses if it is not told.
int attention_kvcache_num_splits(const KvCacheAttentionParams& params);

}  // namespace cuda

}  // namespace flash_attn_norm
