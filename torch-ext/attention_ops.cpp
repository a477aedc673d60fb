#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention_checks.h"
#include "attention_tensors.h"
#include "cpu_threads.h"
#include "tensor_checks.h"
#include "torch_binding.h"

#if defined(CUDA_KERNEL)
#include "device.h"
#endif

namespace fan = flash_attn_norm;

namespace {

using fan::AttentionArguments;
using fan::AttentionBwdParams;
using fan::AttentionFwdParams;
using fan::AttentionProblem;
using fan::contiguous;
using fan::empty_like_device;
using fan::padded_head_dim;
using fan::shape_of;
using fan::strides_of;
using fan::with_last;
using fan::with_vector_rows;
using fan::without_padding;
using fan::workspace_of;
using torch::headeronly::ScalarType;

/// Runs the forward pass; outputs and workspace belong to the device of `q`.
void run(const Tensor& q, AttentionFwdParams& params) {
#if defined(CUDA_KERNEL)
    if (!q.is_cpu()) {
        const fan::CudaContext context(q);
        const std::optional<Tensor> workspace =
            workspace_of(q, fan::cuda::attention_fwd_workspace_bytes(params));
        if (workspace) params.workspace = workspace->mutable_data_ptr();
        fan::cuda::attention_fwd(params, context.stream());
        return;
    }
#endif
    const fan::CpuRuntime runtime = fan::torch_cpu_runtime();
    const std::optional<Tensor> workspace =
        workspace_of(q, fan::cpu::attention_fwd_workspace_bytes(params, runtime));
    if (workspace) params.workspace = workspace->mutable_data_ptr();
    fan::cpu::attention_fwd(params, runtime);
}

/// The same for the backward pass.
void run(const Tensor& q, AttentionBwdParams& params) {
#if defined(CUDA_KERNEL)
    if (!q.is_cpu()) {
        const fan::CudaContext context(q);
        const std::optional<Tensor> workspace =
            workspace_of(q, fan::cuda::attention_bwd_workspace_bytes(params));
        if (workspace) params.workspace = workspace->mutable_data_ptr();
        fan::cuda::attention_bwd(params, context.stream());
        return;
    }
#endif
    const fan::CpuRuntime runtime = fan::torch_cpu_runtime();
    const std::optional<Tensor> workspace =
        workspace_of(q, fan::cpu::attention_bwd_workspace_bytes(params, runtime));
    if (workspace) params.workspace = workspace->mutable_data_ptr();
    fan::cpu::attention_bwd(params, runtime);
}

/// The members in their order.
template <typename... Members>
AttentionArguments arguments_of(const Members&... members) {
    return AttentionArguments{members...};
}

/// Points `params` at q, k and v. A CUDA kernel gets rows that it can load, which replace those of
/// `arguments`, and the head dims of these.
template <typename Params>
void point_at_inputs(AttentionArguments& arguments, Params& params) {
    if (!arguments.q.is_cpu()) {
        arguments.q = with_vector_rows(arguments.q);
        arguments.k = with_vector_rows(arguments.k);
        arguments.v = with_vector_rows(arguments.v);
        AttentionProblem& problem = params.problem;
        problem.head_dim = static_cast<int>(padded_head_dim(problem.head_dim));
        problem.head_dim_v = static_cast<int>(padded_head_dim(problem.head_dim_v));
    }
    params.q = arguments.q.const_data_ptr();
    params.k = arguments.k.const_data_ptr();
    params.v = arguments.v.const_data_ptr();
    params.q_strides = strides_of(arguments.q);
    params.k_strides = strides_of(arguments.k);
    params.v_strides = strides_of(arguments.v);
}

/// A gradient in the shape of `bias`, and where its elements lie; float32 if sums go into it.
Tensor empty_bias_gradient(const Tensor& bias, AttentionBwdParams& params) {
    const int64_t head = bias.dim() - 3;
    const auto stride = [&](int64_t dim) {
        int64_t entries = bias.size(dim) == 1 ? 0 : 1;
        for (int64_t inner = dim + 1; inner < bias.dim(); ++inner) entries *= bias.size(inner);
        return entries;
    };
    params.dattn_bias_strides.batch = head > 0 ? stride(0) : 0;
    params.dattn_bias_strides.head = stride(head);
    params.dattn_bias_strides.row = stride(head + 1);
#if defined(CUDA_KERNEL)
    if (!bias.is_cpu()) params.dattn_bias_dtype = fan::cuda::bias_gradient_dtype(params);
#endif
    Tensor gradient = empty_like_device(
        bias, shape_of(bias),
        params.dattn_bias_dtype == fan::DType::kFloat32 ? ScalarType::Float : bias.scalar_type());
    params.dattn_bias = gradient.mutable_data_ptr();
    return gradient;
}

}  // namespace

std::tuple<Tensor, Tensor> attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& s_aux, const std::optional<Tensor>& attn_bias,
    const std::optional<Tensor>& rng_state, double softmax_scale, bool causal, int64_t window_left,
    int64_t window_right, double softcap, double dropout_p, bool /*deterministic*/,
    bool check_values) {
    AttentionArguments arguments = arguments_of(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, s_aux, attn_bias, rng_state,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, check_values);
    AttentionFwdParams params;
    params.problem = fan::check_attention(arguments);
    const int64_t head_dim_v = params.problem.head_dim_v;
    point_at_inputs(arguments, params);

    Tensor out = empty_like_device(q, with_last(q, params.problem.head_dim_v), q.scalar_type());
    Tensor softmax_lse = empty_like_device(q, lse_shape(params.problem), ScalarType::Float);
    params.out = out.mutable_data_ptr();
    params.softmax_lse = static_cast<float*>(softmax_lse.mutable_data_ptr());
    // Without a row there may still be any number of sequences.
    if (softmax_lse.numel() > 0) run(q, params);
    return {without_padding(out, head_dim_v), softmax_lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_bwd(
    const std::optional<Tensor>& dout, const std::optional<Tensor>& dsoftmax_lse, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& softmax_lse,
    const std::optional<Tensor>& cu_seqlens_q, const std::optional<Tensor>& cu_seqlens_k,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& s_aux,
    const std::optional<Tensor>& attn_bias, const std::optional<Tensor>& rng_state,
    double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
    double dropout_p, bool deterministic, bool needs_ds_aux, bool needs_dattn_bias,
    bool check_values) {
    AttentionArguments arguments = arguments_of(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, s_aux, attn_bias, rng_state,
        softmax_scale, causal, window_left, window_right, softcap, dropout_p, check_values);
    AttentionBwdParams params;
    AttentionProblem& problem = params.problem;
    problem = fan::check_attention(arguments);
    fan::check_attention_gradients(problem, arguments, out, softmax_lse, dout, dsoftmax_lse);
    const int64_t head_dim = problem.head_dim, head_dim_v = problem.head_dim_v;
    point_at_inputs(arguments, params);
    params.deterministic = deterministic;

    Tensor kernel_out = torch::stable::contiguous(out);
    std::optional<Tensor> kernel_dout = dout;
    if (dout) kernel_dout = fan::with_unit_last_stride(*dout);
    if (!q.is_cpu()) {
        kernel_out = with_vector_rows(kernel_out);
        if (dout) kernel_dout = with_vector_rows(*kernel_dout);
    }
    params.out = kernel_out.const_data_ptr();
    if (dout) {
        params.dout = kernel_dout->const_data_ptr();
        params.dout_strides = strides_of(*kernel_dout);
    }
    const Tensor kernel_lse = torch::stable::contiguous(softmax_lse);
    const std::optional<Tensor> kernel_dlse = contiguous(dsoftmax_lse);
    params.softmax_lse = static_cast<const float*>(kernel_lse.const_data_ptr());
    if (kernel_dlse) params.dsoftmax_lse = static_cast<const float*>(kernel_dlse->const_data_ptr());

    Tensor dq = empty_like_device(q, shape_of(arguments.q), q.scalar_type());
    Tensor dk = empty_like_device(k, shape_of(arguments.k), q.scalar_type());
    Tensor dv = empty_like_device(v, shape_of(arguments.v), q.scalar_type());
    params.dq = dq.mutable_data_ptr();
    params.dk = dk.mutable_data_ptr();
    params.dv = dv.mutable_data_ptr();
    Tensor ds_aux = empty_like_device(q, {0}, s_aux ? s_aux->scalar_type() : q.scalar_type());
    Tensor dattn_bias =
        empty_like_device(q, {0}, attn_bias ? attn_bias->scalar_type() : q.scalar_type());
    if (needs_ds_aux && s_aux) {
        ds_aux = empty_like_device(q, {problem.num_heads_q}, ScalarType::Float);
        params.ds_aux = static_cast<float*>(ds_aux.mutable_data_ptr());
    }
    if (needs_dattn_bias && attn_bias) dattn_bias = empty_bias_gradient(*attn_bias, params);

    if (dq.numel() > 0 || dk.numel() > 0) {
        run(q, params);
    } else {  // without a row there may still be any number of sequences
        if (params.ds_aux != nullptr) torch::stable::zero_(ds_aux);
        if (params.dattn_bias != nullptr) torch::stable::zero_(dattn_bias);
    }
    if (params.ds_aux != nullptr) ds_aux = torch::stable::to(ds_aux, s_aux->scalar_type());
    if (params.dattn_bias != nullptr) {
        dattn_bias = torch::stable::to(dattn_bias, attn_bias->scalar_type());
    }
    return {without_padding(dq, head_dim), without_padding(dk, head_dim),
            without_padding(dv, head_dim_v), ds_aux, dattn_bias};
}
