#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "refusals.h"
#include "registration.h"

using flash_attn_norm::Announced;

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
    // Dense and packed attention are one op: packed when cu_seqlens_q and cu_seqlens_k are given.
    // The forward pass itself is always deterministic; it takes the flag for its gradient formula.
    ops.def(
        "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
        " Tensor? alibi_slopes, Tensor? s_aux, Tensor? attn_bias, Tensor? rng_state,"
        " float softmax_scale, bool causal, int window_left, int window_right, float softcap,"
        " float dropout_p, bool deterministic, bool check_values)"
        " -> (Tensor out, Tensor softmax_lse)");
    ops.def(
        "attention_bwd(Tensor? dout, Tensor? dsoftmax_lse, Tensor q, Tensor k, Tensor v,"
        " Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
        " Tensor? alibi_slopes, Tensor? s_aux, Tensor? attn_bias, Tensor? rng_state,"
        " float softmax_scale, bool causal, int window_left, int window_right, float softcap,"
        " float dropout_p, bool deterministic, bool needs_ds_aux, bool needs_dattn_bias,"
        " bool check_values)"
        " -> (Tensor dq, Tensor dk, Tensor dv, Tensor ds_aux, Tensor dattn_bias)");
    // Attention to a key-value cache, without gradients; seqlen is added to the lengths that the
    // index tensors give, or is the length where there are none. The second op first writes k and v
    // into the cache, from that length on: one op, so that nothing is written if it refuses. A
    // descale is its tensor, or 1, times its factor.
    ops.def(
        "attention_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cu_seqlens_q,"
        " Tensor? cu_seqlens_k, Tensor? cache_seqlens, Tensor? cache_batch_idx,"
        " Tensor? cache_leftpad, Tensor? page_table, Tensor? alibi_slopes, Tensor? s_aux,"
        " SymInt seqlen, float softmax_scale, bool causal, int window_left, int window_right,"
        " float softcap, int num_splits, bool check_values, Tensor? k_descale=None,"
        " Tensor? v_descale=None, float k_descale_factor=1.0, float v_descale_factor=1.0)"
        " -> (Tensor out, Tensor softmax_lse)");
    ops.def(
        "attention_kvcache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor q, Tensor k,"
        " Tensor v, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? cache_seqlens,"
        " Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? page_table,"
        " Tensor? alibi_slopes, Tensor? s_aux, SymInt seqlen, float softmax_scale, bool causal,"
        " int window_left, int window_right, float softcap, bool rotary_interleaved,"
        " int num_splits, bool check_values, Tensor? k_descale=None, Tensor? v_descale=None,"
        " float k_descale_factor=1.0, float v_descale_factor=1.0)"
        " -> (Tensor out, Tensor softmax_lse)");
    // stats: what the backward pass needs of each row, rstd or (rstd, mean). residual_out: x +
    // residual, empty unless needed.
    ops.def(
        "norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
        " float weight_offset, int casting_mode, bool is_layer_norm, bool residual_in_fp32,"
        " bool needs_residual_out) -> (Tensor out, Tensor residual_out, Tensor stats)");
    ops.def(
        "norm_bwd(Tensor dout, Tensor? dresidual_out, Tensor sum, Tensor? weight, Tensor? bias,"
        " Tensor stats, float weight_offset, int casting_mode, bool is_layer_norm,"
        " bool needs_dresidual, bool needs_dweight, bool needs_dbias)"
        " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
    ops.impl("attention_fwd", TORCH_BOX(&Announced<&attention_fwd>::call));
    ops.impl("attention_bwd", TORCH_BOX(&Announced<&attention_bwd>::call));
    ops.impl("attention_kvcache", TORCH_BOX(&Announced<&attention_kvcache>::call));
    ops.impl("attention_kvcache_append", TORCH_BOX(&Announced<&attention_kvcache_append>::call));
    ops.impl("norm_fwd", TORCH_BOX(&Announced<&norm_fwd>::call));
    ops.impl("norm_bwd", TORCH_BOX(&Announced<&norm_bwd>::call));
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
    ops.impl("attention_fwd", TORCH_BOX(&Announced<&attention_fwd>::call));
    ops.impl("attention_bwd", TORCH_BOX(&Announced<&attention_bwd>::call));
    ops.impl("attention_kvcache", TORCH_BOX(&Announced<&attention_kvcache>::call));
    ops.impl("attention_kvcache_append", TORCH_BOX(&Announced<&attention_kvcache_append>::call));
    ops.impl("norm_fwd", TORCH_BOX(&Announced<&norm_fwd>::call));
    ops.impl("norm_bwd", TORCH_BOX(&Announced<&norm_bwd>::call));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
