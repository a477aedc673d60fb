#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "attention/params.h"
#include "kvcache_checks.h"

/// The descales of a float8 cache: what its elements are multiplied with.
namespace flash_attn_norm {

bool is_float8_cache(const KvCacheArguments& arguments);

/// Refuses all but their values.
void check_kvcache_descales(const KvCacheArguments& arguments, int64_t batch_size);

/// Refuses values that are not positive and finite.
void check_descale_values(const char* name, const std::optional<Tensor>& descale);

void describe_descales(const KvCacheArguments& arguments, KvCacheLayout& cache);

}  // namespace flash_attn_norm
