"""The attention ops as torch sees them: fakes, the gradient formula and the call that all public
functions share."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .arguments import (
    check_dropout_p,
    check_flag,
    check_number,
    check_tensor,
    check_window_size,
    refuse_dtensor,
    refuse_forward_mode,
)
from .attention_shapes import check_attention_scalars, check_dropout, check_shapes, refuse_mask
from .calls import differentiable, save_nothing

_check_values = False


def check_inputs(enabled: bool) -> None:
    """Turns the check of index tensors' values on a GPU (``cu_seqlens_q``, ``cache_seqlens``,
    ``block_table`` and the like) on or off.

    Off at first: the host does not read values that lie on a GPU, and the kernels clamp each of
    them to the tensor that it indexes, so that no value leads outside it; wrong values give wrong
    results. On: every forward call reads them, which synchronises, and raises the errors that a
    call on the CPU raises, where the values are always checked. Shapes, dtypes, devices and
    strides are always checked.

    Args:
        enabled: True or False, for all later calls of this process.

    Raises:
        ValueError: if ``enabled`` is no such value.
        RuntimeError: if switched on, or left on, while a CUDA graph is captured.
    """
    global _check_values
    enabled = check_flag("enabled", enabled)
    if enabled and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "check_inputs(True) was called during a CUDA graph capture, which forbids the "
            "synchronisation that it asks for; call it before or after the capture"
        )
    _check_values = enabled


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    s_aux: Optional[Tensor],
    attn_bias: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """One call of the differentiable op; gives ``(out, softmax_lse)``."""
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, s_aux, attn_bias)
    window_left, window_right = check_window_size(window_size)
    causal, softcap, dropout_p = check_scalars(causal, softcap, dropout_p)
    deterministic = check_flag("deterministic", deterministic)
    refuse_forward_mode("attention", q=q, k=k, v=v, s_aux=s_aux, attn_bias=attn_bias)
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "alibi_slopes.requires_grad is True, but attention has no gradient for them; pass "
            "alibi_slopes.detach(), or a learnable bias as attn_bias"
        )
    if softmax_scale is None:
        # A tensor without dimensions or without a head_dim goes on to the op, which refuses it.
        softmax_scale = q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    else:
        softmax_scale = check_number("softmax_scale", softmax_scale)
    # Drawn here, so that capture, compile and checkpointing treat it as torch's own randomness.
    rng_state = draw_rng_state(q) if dropout_p > 0 else None
    return _forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        s_aux,
        attn_bias,
        rng_state,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        dropout_p,
        deterministic,
        _check_values,
    )


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    s_aux: Optional[Tensor],
    attn_bias: Optional[Tensor],
) -> None:
    """Refuses what the op could not dispatch on; shapes, dtypes and devices are the op's matter."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        refuse_dtensor(name, value)
        check_tensor(name, value)
    for name, value in (
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_k", cu_seqlens_k),
        ("alibi_slopes", alibi_slopes),
        ("s_aux", s_aux),
        ("attn_bias", attn_bias),
    ):
        if value is not None:
            refuse_dtensor(name, value)
            check_tensor(name, value)
    if attn_bias is not None and not attn_bias.dtype.is_floating_point:
        refuse_mask(q, k, cu_seqlens_q, attn_bias)


def check_scalars(causal: bool, softcap: float, dropout_p: float) -> tuple[bool, float, float]:
    """The three as the op's schema takes them; their ranges are the op's matter."""
    return (
        check_flag("causal", causal),
        check_number("softcap", softcap),
        check_dropout_p(dropout_p),
    )


def draw_rng_state(q: Tensor) -> Tensor:
    """Seed and offset of a dropout mask, from torch's generator for the device of ``q``."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def checks_values() -> bool:
    return _check_values


@torch.library.register_fake(add_op_namespace_prefix("attention_fwd"))
def _attention_fwd_fake(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    s_aux,
    attn_bias,
    rng_state,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    dropout_p,
    deterministic,
    check_values,
):
    check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, s_aux, attn_bias, rng_state)
    check_attention_scalars(softmax_scale, window_left, window_right, softcap)
    check_dropout(dropout_p, rng_state)
    packed = cu_seqlens_q is not None
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    # (num_heads_q, total_q) packed, (batch_size, num_heads_q, seqlen_q) dense
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.register_fake(add_op_namespace_prefix("attention_bwd"))
def _attention_bwd_fake(
    dout,
    dsoftmax_lse,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    s_aux,
    attn_bias,
    rng_state,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    dropout_p,
    deterministic,
    needs_ds_aux,
    needs_dattn_bias,
    check_values,
):
    check_shapes(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, s_aux, attn_bias, rng_state)
    check_attention_scalars(softmax_scale, window_left, window_right, softcap)
    check_dropout(dropout_p, rng_state)

    def gradient(tensor, wanted):
        if tensor is None:
            return q.new_empty((0,))
        return tensor.new_empty(tensor.shape if wanted else (0,))

    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        gradient(s_aux, needs_ds_aux),
        gradient(attn_bias, needs_dattn_bias),
    )


def _setup_context(ctx, inputs, output):
    (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        s_aux,
        attn_bias,
        rng_state,
        ctx.softmax_scale,
        ctx.causal,
        ctx.window_left,
        ctx.window_right,
        ctx.softcap,
        ctx.dropout_p,
        ctx.deterministic,
        _check_values,
    ) = inputs
    out, softmax_lse = output
    ctx.set_materialize_grads(False)  # an unused softmax_lse or out has no gradient, not a zero one
    ctx.save_for_backward(
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        s_aux,
        attn_bias,
        rng_state,
    )


def _backward(ctx, dout, dsoftmax_lse):
    no_gradients = (None,) * 9  # rng_state and what is no tensor
    if dout is None and dsoftmax_lse is None:
        return (None,) * 8 + no_gradients
    (
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        s_aux,
        attn_bias,
        rng_state,
    ) = ctx.saved_tensors
    _, _, _, _, _, _, needs_ds_aux, needs_dattn_bias = ctx.needs_input_grad[:8]
    dq, dk, dv, ds_aux, dattn_bias = _gradients(
        dout,
        dsoftmax_lse,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        s_aux,
        attn_bias,
        rng_state,
        ctx.softmax_scale,
        ctx.causal,
        ctx.window_left,
        ctx.window_right,
        ctx.softcap,
        ctx.dropout_p,
        ctx.deterministic,
        needs_ds_aux,
        needs_dattn_bias,
        False,  # the forward pass has checked the values
    )
    return (
        dq,
        dk,
        dv,
        None,
        None,
        None,
        ds_aux if needs_ds_aux else None,
        dattn_bias if needs_dattn_bias else None,
        *no_gradients,
    )


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError(
        "attention has no second derivative: its gradients were differentiated once more, as "
        "create_graph=True or a gradient penalty asks for; compute that part with "
        "torch.nn.functional.scaled_dot_product_attention's math backend"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("attention_fwd"), _backward, setup_context=_setup_context
)
torch.library.register_autograd(add_op_namespace_prefix("attention_bwd"), _refuse_second_derivative)

_forward = differentiable(ops.attention_fwd, _setup_context, _backward)
_gradients = differentiable(ops.attention_bwd, save_nothing, _refuse_second_derivative)
