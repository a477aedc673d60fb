#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "attention/params.h"

namespace flash_attn_norm {

using torch::stable::Tensor;

/// What both attention ops take, as it came from Python. Hidden, as torch::stable::Tensor is.
struct [[gnu::visibility("hidden")]] AttentionArguments {
    Tensor q, k, v;
    std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;
    std::optional<Tensor> alibi_slopes, s_aux, attn_bias, rng_state;
    double softmax_scale;
    bool causal;
    int64_t window_left, window_right;
    double softcap, dropout_p;
    bool check_values;
};

/// Refuses what the kernels cannot take (std::invalid_argument, before any kernel runs) and
/// describes the rest. Tensors whose last dimension is not of unit stride are replaced in
/// `arguments` by a contiguous copy; the problem's pointers point into `arguments`.
AttentionProblem check_attention(AttentionArguments& arguments);

/// Refuses the backward pass's own tensors unless they fit what the forward pass gave.
void check_attention_gradients(const AttentionProblem& problem, const AttentionArguments& arguments,
                               const Tensor& out, const Tensor& softmax_lse,
                               const std::optional<Tensor>& dout,
                               const std::optional<Tensor>& dsoftmax_lse);

/// Parts of the checks that other attention ops share.
void check_attention_scalars(double softmax_scale, int64_t window_left, int64_t window_right,
                             double softcap);
void check_alibi_slopes(const Tensor& slopes, int64_t num_heads_q, int64_t batch_size);
void check_s_aux(const Tensor& s_aux, int64_t num_heads_q);

/// Points the problem at alibi_slopes and s_aux, copied if their layout asks for it.
void describe_head_terms(std::optional<Tensor>& alibi_slopes, std::optional<Tensor>& s_aux,
                         AttentionProblem& problem);

}  // namespace flash_attn_norm
