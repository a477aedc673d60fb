"""FlashAttention-2's functions for q, k and v, or k and v, that lie in one tensor."""

from collections.abc import Sequence
from typing import Optional, Union

from torch import Tensor

from .arguments import check_tensor
from .attention import AttentionResult, flash_attn_func, flash_attn_varlen_func


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    return_softmax_lse: bool = False,
) -> AttentionResult:
    """``flash_attn_func`` of q, k and v that lie in one tensor; no copy is made of them.

    Args:
        qkv: (batch_size, seqlen, 3, num_heads, head_dim).

    Returns:
        As ``flash_attn_func``; all other arguments and errors too.
    """
    _check_packed("qkv", qkv, "(batch_size, seqlen, 3, num_heads, head_dim)", 2, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        attn_bias=attn_bias,
        return_softmax_lse=return_softmax_lse,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    return_softmax_lse: bool = False,
) -> AttentionResult:
    """``flash_attn_func`` of k and v that lie in one tensor; no copy is made of them.

    Args:
        q: (batch_size, seqlen_q, num_heads_q, head_dim).
        kv: (batch_size, seqlen_k, 2, num_heads_kv, head_dim).

    Returns:
        As ``flash_attn_func``; all other arguments and errors too.
    """
    _check_packed("kv", kv, "(batch_size, seqlen_k, 2, num_heads_kv, head_dim)", 2, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        attn_bias=attn_bias,
        return_softmax_lse=return_softmax_lse,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Union[int, Tensor],
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    return_softmax_lse: bool = False,
) -> AttentionResult:
    """``flash_attn_varlen_func`` of q, k and v that lie in one tensor; no copy is made of them.

    Args:
        qkv: (total, 3, num_heads, head_dim).
        cu_seqlens: (batch_size + 1,), int32: cu_seqlens_q and cu_seqlens_k in one; errors about its
            values name these.
        max_seqlen: max_seqlen_q and max_seqlen_k in one.

    Returns:
        As ``flash_attn_varlen_func``; all other arguments and errors too.
    """
    _check_packed("qkv", qkv, "(total, 3, num_heads, head_dim)", 1, 3)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        attn_bias=attn_bias,
        return_softmax_lse=return_softmax_lse,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Union[int, Tensor],
    max_seqlen_k: Union[int, Tensor],
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    return_softmax_lse: bool = False,
) -> AttentionResult:
    """``flash_attn_varlen_func`` of k and v that lie in one tensor; no copy is made of them.

    Args:
        q: (total_q, num_heads_q, head_dim).
        kv: (total_k, 2, num_heads_kv, head_dim).

    Returns:
        As ``flash_attn_varlen_func``; all other arguments and errors too.
    """
    _check_packed("kv", kv, "(total_k, 2, num_heads_kv, head_dim)", 1, 2)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
        attn_bias=attn_bias,
        return_softmax_lse=return_softmax_lse,
    )


def _check_packed(name: str, value: Tensor, shape: str, dim: int, count: int) -> None:
    check_tensor(name, value)
    if value.dim() != dim + 3 or value.shape[dim] != count:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}")
