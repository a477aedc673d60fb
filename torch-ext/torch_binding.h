#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

/// The ops, one implementation for all devices: each function checks its tensors, allocates, fills
/// a params struct and calls cpu:: or cuda:: of csrc/ by the device of its first tensor.

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& s_aux, const std::optional<Tensor>& attn_bias,
    const std::optional<Tensor>& rng_state, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, double softcap, double dropout_p, bool deterministic, bool check_values);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd(
    const std::optional<Tensor>& dout, const std::optional<Tensor>& dsoftmax_lse, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux,
    const std::optional<Tensor>& attn_bias, const std::optional<Tensor>& rng_state,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, bool deterministic, bool needs_ds_aux, bool needs_dattn_bias,
    bool check_values);

std::tuple<Tensor, Tensor> attention_kvcache(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& cache_seqlens, const std::optional<Tensor>& cache_batch_idx,
    const std::optional<Tensor>& cache_leftpad, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux, int64_t seqlen,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    int64_t num_splits, bool check_values, const std::optional<Tensor>& k_descale,
    const std::optional<Tensor>& v_descale, double k_descale_factor, double v_descale_factor);

std::tuple<Tensor, Tensor> attention_kvcache_append(
    Tensor k_cache, Tensor v_cache, const Tensor& q, const Tensor& k, const Tensor& v,
    const std::optional<Tensor>& rotary_cos, const std::optional<Tensor>& rotary_sin,
    const std::optional<Tensor>& cache_seqlens, const std::optional<Tensor>& cache_batch_idx,
    const std::optional<Tensor>& cache_leftpad, const std::optional<Tensor>& page_table,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux, int64_t seqlen,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    bool rotary_interleaved, int64_t num_splits, bool check_values,
    const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
    double k_descale_factor, double v_descale_factor);

std::tuple<Tensor, Tensor, Tensor> norm_fwd(const Tensor& x, const std::optional<Tensor>& residual,
                                            const std::optional<Tensor>& weight,
                                            const std::optional<Tensor>& bias, double eps,
                                            double weight_offset, int64_t casting_mode,
                                            bool is_layer_norm, bool residual_in_fp32,
                                            bool needs_residual_out);

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_bwd(
    const Tensor& dout, const std::optional<Tensor>& dresidual_out, const Tensor& sum,
    const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& stats,
    double weight_offset, int64_t casting_mode, bool is_layer_norm, bool needs_dresidual,
    bool needs_dweight, bool needs_dbias);
