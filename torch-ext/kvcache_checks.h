#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "attention/params.h"

namespace flash_attn_norm {

using torch::stable::Tensor;

/// What both ops of a key-value cache take, as it came from Python. Hidden, as
/// torch::stable::Tensor is.
struct [[gnu::visibility("hidden")]] KvCacheArguments {
    Tensor q, k_cache, v_cache;
    std::optional<Tensor> k, v, rotary_cos, rotary_sin;  // what is appended, and how it is rotated
    std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;
    std::optional<Tensor> cache_seqlens, cache_batch_idx, cache_leftpad, page_table;
    std::optional<Tensor> alibi_slopes, s_aux;
    int64_t seqlen;  // rows in the cache before the call, as KvCacheLayout counts them
    double softmax_scale;
    bool causal;
    int64_t window_left, window_right;
    double softcap;
    int64_t num_splits;
    bool check_values;
    std::optional<Tensor> k_descale, v_descale;  // of a float8 cache; none: 1
    double k_descale_factor, v_descale_factor;   // these times

    int64_t seqlen_new() const { return k ? k->size(1) : 0; }
};

/// Refuses what the kernels cannot take (std::invalid_argument, before anything is written) and
/// describes the rest: attention to the cache after the append, but for the pointers to data.
/// Layouts that the kernels do not read are replaced in `arguments` by copies; the result points
/// into `arguments`.
KvCacheAttentionParams check_kvcache(KvCacheArguments& arguments);

}  // namespace flash_attn_norm
