#pragma once

#include <cstdint>

#include "kvcache_checks.h"

namespace flash_attn_norm {

/// Refuses index tensors of another dtype, shape or layout than the kernels read.
void check_kvcache_index_tensors(const KvCacheArguments& arguments, int64_t batch_size);

/// Refuses lengths behind the capacity, and indices outside the cache: those of an int and on the
/// CPU always; on a GPU, where it costs a synchronisation, if `arguments` ask for it.
void check_kvcache_values(const KvCacheArguments& arguments, const KvCacheAttentionParams& params);

}  // namespace flash_attn_norm
