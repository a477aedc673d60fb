"""FlashAttention-2's private functions, which other libraries call by name: its signatures and its
results, on our ops. As there, autograd does not see through them."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import ops
from .arguments import check_flag, check_number, check_tensor, check_whole_number
from .attention_op import check_scalars, check_tensors, checks_values, draw_rng_state
from .calls import call
from .kvcache_op import paged_attention
from .seqused import Sequences, cut_at_used_keys

_ROW_BLOCK = 128  # FlashAttention-2 rounds the rows of softmax_d up to this


def _refuse_return_softmax(return_softmax: bool) -> None:
    if return_softmax:
        raise ValueError(
            "return_softmax is True, but no probability matrix is kept; it must be False"
        )


def _check_index_tensors(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    # The op takes their absence for dense attention.
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    check_tensor("cu_seqlens_k", cu_seqlens_k)


def _check_scalars(
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
) -> tuple[float, float, bool, int, int, float]:
    causal, softcap, dropout_p = check_scalars(causal, softcap, dropout_p)
    return (
        dropout_p,
        check_number("softmax_scale", softmax_scale),
        causal,
        check_whole_number("window_size_left", window_size_left),
        check_whole_number("window_size_right", window_size_right),
        softcap,
    )


def _check_gradients(q: Tensor, k: Tensor, v: Tensor, **given: Optional[Tensor]) -> None:
    """Refuses tensors among dout, out, softmax_lse, dq, dk and dv that are none, and gradients
    that do not have their input's shape: a copy would broadcast into them."""
    for name, value in given.items():
        like = {"dq": q, "dk": k, "dv": v}.get(name)
        if like is None:
            check_tensor(name, value)
        elif value is not None:
            check_tensor(name, value)
            if value.shape != like.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must be that of {name[1:]}, "
                    f"{tuple(like.shape)}"
                )


def _fill(gradients, results) -> None:
    for gradient, result in zip(gradients, results):
        if gradient is not None:
            gradient.copy_(result)


def _row_sums(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.float() * out.float()).sum(-1)


def _rounded_up(rows: int) -> int:
    return (rows + _ROW_BLOCK - 1) // _ROW_BLOCK * _ROW_BLOCK


@torch.no_grad()
def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, softmax_lse, S_dmask, rng_state)`` of dense attention.

    ``S_dmask`` is always empty, (0,). ``rng_state`` is (2,) int64, seed and offset of the dropout
    mask; zeros without dropout. Shapes and errors are those of ``flash_attn_func``.
    """
    _refuse_return_softmax(return_softmax)
    check_tensors(q, k, v, None, None, alibi_slopes, None, None)
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap = _check_scalars(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    rng_state = draw_rng_state(q) if dropout_p > 0 else None
    out, softmax_lse = call(
        ops.attention_fwd,
        (
            q,
            k,
            v,
            None,
            None,
            alibi_slopes,
            None,
            None,
            rng_state,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            dropout_p,
            False,
            False,
        ),
    )
    if rng_state is None:
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
    return out, softmax_lse, q.new_empty((0,)), rng_state


@torch.no_grad()
def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """Writes the gradients of dense attention into ``dq``, ``dk`` and ``dv``, each of which may be
    None, and gives ``softmax_d``.

    ``softmax_d`` is (batch_size, num_heads_q, seqlen_q rounded up to 128) float32, the row sums of
    dout * out; zero in the rows past seqlen_q. ``rng_state`` is the forward pass's. ``out`` may
    also be one that was merged from several calls; the gradients take it as it was rounded, whereas
    of this call's own they undo the rounding where there is dropout.
    """
    check_tensors(q, k, v, None, None, alibi_slopes, None, None)
    _check_gradients(q, k, v, dout=dout, out=out, softmax_lse=softmax_lse, dq=dq, dk=dk, dv=dv)
    deterministic = check_flag("deterministic", deterministic)
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap = _check_scalars(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    gradients = call(
        ops.attention_bwd,
        (
            dout,
            None,
            q,
            k,
            v,
            out,
            softmax_lse,
            None,
            None,
            alibi_slopes,
            None,
            None,
            rng_state,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            dropout_p,
            deterministic,
            False,
            False,
            False,
        ),
    )
    _fill((dq, dk, dv), gradients[:3])
    softmax_d = _row_sums(dout, out).transpose(1, 2)
    padding = _rounded_up(q.shape[1]) - q.shape[1]
    return torch.nn.functional.pad(softmax_d, (0, padding))


@torch.no_grad()
def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(out, softmax_lse, S_dmask, rng_state)`` of packed attention; see ``_flash_attn_forward``.

    ``max_seqlen_q`` and ``max_seqlen_k`` are read by nothing. ``zero_tensors`` changes nothing:
    every element is written. ``leftpad_k``, with a ``block_table`` alone (ValueError), is
    (batch_size,) int32: rows in front of the first key. ``seqused_k``, shapes and further errors
    are those of ``flash_attn_varlen_func``.
    """
    _refuse_return_softmax(return_softmax)
    _check_index_tensors(cu_seqlens_q, cu_seqlens_k)
    if block_table is not None:
        out, softmax_lse = paged_attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            dropout_p,
            softmax_scale,
            causal,
            (window_size_left, window_size_right),
            softcap,
            alibi_slopes,
            None,
            None,
            leftpad_k,
            seqused_k,
        )
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
        return out, softmax_lse, q.new_empty((0,)), rng_state
    if leftpad_k is not None:
        raise ValueError("leftpad_k is given without a block_table; it must be None")
    if seqused_k is not None:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, alibi_slopes)
        cu_seqlens_q, cu_seqlens_k, alibi_slopes = cut_at_used_keys(sequences, seqused_k)
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, None, None)
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap = _check_scalars(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    rng_state = draw_rng_state(q) if dropout_p > 0 else None
    out, softmax_lse = call(
        ops.attention_fwd,
        (
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            alibi_slopes,
            None,
            None,
            rng_state,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            dropout_p,
            False,
            checks_values(),
        ),
    )
    if rng_state is None:
        rng_state = torch.zeros((2,), dtype=torch.int64, device=q.device)
    return out, softmax_lse, q.new_empty((0,)), rng_state


@torch.no_grad()
def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes the gradients of packed attention into ``dq``, ``dk`` and ``dv``, each of which may be
    None, and gives ``softmax_d``.

    ``softmax_d`` is (num_heads_q, total_q + 128 * batch_size) float32: sequence i begins at column
    ``cu_seqlens_q[i] + 128 * i``; zero in all other columns.
    """
    _check_index_tensors(cu_seqlens_q, cu_seqlens_k)
    check_tensors(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, None, None)
    _check_gradients(q, k, v, dout=dout, out=out, softmax_lse=softmax_lse, dq=dq, dk=dk, dv=dv)
    deterministic = check_flag("deterministic", deterministic)
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap = _check_scalars(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    gradients = call(
        ops.attention_bwd,
        (
            dout,
            None,
            q,
            k,
            v,
            out,
            softmax_lse,
            cu_seqlens_q,
            cu_seqlens_k,
            alibi_slopes,
            None,
            None,
            rng_state,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            dropout_p,
            deterministic,
            False,
            False,
            checks_values(),
        ),
    )
    _fill((dq, dk, dv), gradients[:3])
    total_q, batch_size = q.shape[0], cu_seqlens_q.shape[0] - 1
    rows = torch.arange(total_q, dtype=torch.int32, device=q.device)
    # A row that no sequence covers falls behind the last sequence's begin, where out is zero.
    sequence = torch.searchsorted(cu_seqlens_q[1:], rows, right=True).clamp(max=batch_size - 1)
    softmax_d = q.new_zeros((q.shape[1], total_q + _ROW_BLOCK * batch_size), dtype=torch.float32)
    if batch_size > 0:
        softmax_d[:, rows + _ROW_BLOCK * sequence] = _row_sums(dout, out).t()
    return softmax_d


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
