"""Attention with FlashAttention-2's functions, and more: a sink, an additive bias with its
gradient, a differentiable log-sum-exp."""

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from .arguments import by_name, check_dropout_p, check_flag, check_whole_number
from .attention_op import attention
from .kvcache_op import paged_attention
from .seqused import Sequences, cut_at_used_keys

AttentionResult = Union[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, None]]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    """Softmax attention over sequences of one length, with gradients.

    The score of query row i and key j is ``softmax_scale * q_i . k_j``, then capped by ``softcap``,
    then lowered by ALiBi, then raised by ``attn_bias``. Query head h reads KV head
    ``h // (num_heads_q / num_heads_kv)``.

    Row i stands at key ``i + seqlen_k - seqlen_q``: causal masks and windows are aligned
    bottom-right, so that the last query meets the last key. With 2 queries, 4 keys and
    ``causal=True`` row 0 sees keys 0 to 2 and row 1 sees all; with 4 queries and 2 keys rows 0 and
    1 see none. A row that sees no key, be it for the mask or for a bias of -inf everywhere, gives
    out 0, softmax_lse -inf (or its sink) and gradients 0.

    Args:
        q: (batch_size, seqlen_q, num_heads_q, head_dim); bfloat16, float16 or, on the CPU only,
            float32. Any strides; a last dimension whose stride is not 1 costs a copy.
        k: (batch_size, seqlen_k, num_heads_kv, head_dim), dtype of ``q``. num_heads_kv divides
            num_heads_q; head_dim is 1 to 512. On a GPU a head_dim that is no multiple of 8 costs a
            copy.
        v: (batch_size, seqlen_k, num_heads_kv, head_dim_v), dtype of ``q``; head_dim_v is 1 to 512
            and may differ from head_dim.
        dropout_p: probability in [0, 1) of dropping an attention weight. The mask comes from
            torch's generator for the device, and the backward pass uses the same one.
        softmax_scale: factor of q . k, finite; None means ``head_dim ** -0.5``.
        causal: whether a row sees no key behind its own position.
        window_size: (left, right), how many keys before and behind its position a row sees; -1 is
            no bound. ``causal`` makes the right one 0.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``; 0 is off.
        alibi_slopes: (num_heads_q,) or (batch_size, num_heads_q), float32; the score of row i and
            key j loses ``slope * abs(i + seqlen_k - seqlen_q - j)``. They have no gradient.
        deterministic: whether two backward passes give the same bits. The forward pass always does.
        return_attn_probs: returns ``(out, softmax_lse, None)``; FlashAttention-2's third result, a
            probability matrix, is not kept, so that this is refused with dropout.
        s_aux: (num_heads_q,), the attention sink of each head: one more logit of every row, not
            scaled, that takes weight and has no value; float32, bfloat16 or float16.
        attn_bias: (1 or batch_size, 1 or num_heads_q, 1 or seqlen_q, seqlen_k), added to the
            scores; dtype of ``q`` or float32. Its gradient has its shape and dtype, summed in
            float32 over broadcast dimensions. It may hold -inf.
        return_softmax_lse: returns ``(out, softmax_lse)``.

    Returns:
        out, (batch_size, seqlen_q, num_heads_q, head_dim_v), dtype of ``q``, contiguous; with
        ``return_softmax_lse`` or ``return_attn_probs`` also softmax_lse, (batch_size, num_heads_q,
        seqlen_q), float32: the natural logarithm of the row's sum of exponentials, sink included.
        It is differentiable.

    Raises:
        ValueError: an argument that is not as above; the text names it, its value and what is
            allowed.
        NotImplementedError: on differentiating a gradient once more, or in forward mode.
    """
    _check_results(return_attn_probs, return_softmax_lse, dropout_p)
    out, softmax_lse = attention(
        q,
        k,
        v,
        None,
        None,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        s_aux,
        attn_bias,
    )
    return _result(out, softmax_lse, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Optional[Tensor],
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
    block_table: Optional[Tensor] = None,
    *,
    s_aux: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    return_softmax_lse: bool = False,
    seqused_k: Optional[Tensor] = None,
) -> AttentionResult:
    """Softmax attention over packed sequences: sequence i is rows ``cu_seqlens_q[i]`` to
    ``cu_seqlens_q[i + 1]`` of ``q`` and likewise of ``k`` and ``v``, and sees no other.

    What is not said here is as in ``flash_attn_func``, each sequence with its own seqlen_q and
    seqlen_k; either may be 0. ``q`` and ``k`` may have more rows than the sequences cover: these
    give out 0, softmax_lse -inf and gradients 0. No sequences at all (index tensors of one element)
    are the case that all rows are such.

    Args:
        q: (total_q, num_heads_q, head_dim).
        k: (total_k, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch_size + 1,), int32, contiguous, on the device of ``q``: 0, then the
            running sum of the lengths, at most total_q. On the CPU the values are checked; on a GPU
            they are not read by the host but clamped to the rows that there are, and
            ``check_inputs(True)`` turns on the check.
        cu_seqlens_k: (batch_size + 1,), likewise, at most total_k.
        max_seqlen_q: at least the longest seqlen_q, as an int or a tensor without dimensions.
            Nothing depends on it, and a tensor is never read.
        max_seqlen_k: likewise for seqlen_k.
        alibi_slopes: (num_heads_q,) or (batch_size, num_heads_q), float32.
        block_table: (batch_size, pages_per_sequence), int32: ``k`` and ``v`` are then the pages of
            a key-value cache, (num_pages, page_size, num_heads_kv, head_dim or head_dim_v), of
            which sequence i has those of row i, and ``cu_seqlens_k`` says only how many keys it
            has. As in ``flash_attn_with_kvcache`` there is no gradient; dropout and ``attn_bias``
            are refused.
        attn_bias: (1 or num_heads_q, 1 or total_q, columns), columns being at least the longest
            seqlen_k; column j belongs to key j of the row's own sequence. Gradient 0 where a row
            has no such key.
        seqused_k: (batch_size,), int32, how many of its keys each sequence uses, the first ones:
            its seqlen_k, as masks count. The others are not used, whatever they hold, and have
            gradients 0. At most the length in ``cu_seqlens_k``, or with a ``block_table``, where
            ``cu_seqlens_k`` may be None, the room on the pages; checked or clamped as
            ``cu_seqlens_q``.

    Returns:
        out, (total_q, num_heads_q, head_dim_v); softmax_lse, if asked for, (num_heads_q, total_q).

    Raises:
        ValueError: as ``flash_attn_func``.
    """
    _check_results(return_attn_probs, return_softmax_lse, dropout_p)
    _check_index_tensor("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is not None or block_table is None or seqused_k is None:
        _check_index_tensor("cu_seqlens_k", cu_seqlens_k)
    _check_max_seqlen("max_seqlen_q", max_seqlen_q)
    _check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if block_table is not None:
        check_flag("deterministic", deterministic)  # there is no gradient
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
            window_size,
            softcap,
            alibi_slopes,
            s_aux,
            attn_bias,
            seqused_k=seqused_k,
        )
        return _result(out, softmax_lse, return_attn_probs, return_softmax_lse)
    if seqused_k is not None:
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, alibi_slopes)
        cu_seqlens_q, cu_seqlens_k, alibi_slopes = cut_at_used_keys(sequences, seqused_k)
    out, softmax_lse = attention(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        s_aux,
        attn_bias,
    )
    return _result(out, softmax_lse, return_attn_probs, return_softmax_lse)


def _check_results(return_attn_probs: bool, return_softmax_lse: bool, dropout_p: float) -> None:
    check_flag("return_softmax_lse", return_softmax_lse)
    with_probs = check_flag("return_attn_probs", return_attn_probs)
    if with_probs and check_dropout_p(dropout_p) > 0:
        raise ValueError(
            f"return_attn_probs is True with dropout_p {dropout_p}, but no probability matrix is "
            "kept; use return_softmax_lse=True, or dropout_p 0"
        )


def _check_index_tensor(name: str, value: Optional[Tensor]) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name} is {value}; it must be an int32 tensor of shape (batch_size + 1,)"
            f"{by_name(value)}"
        )


def _check_max_seqlen(name: str, value: Union[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; it must be an int or a tensor without "
                "dimensions"
            )
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            raise ValueError(
                f"{name} is a tensor of {value.dtype}; it must be an int or a tensor of an integer "
                "dtype without dimensions"
            )
    elif check_whole_number(name, value, "an int of at least 0, or a tensor") < 0:
        raise ValueError(f"{name} is {value}; it must be an int of at least 0, or a tensor")


def _result(
    out: Tensor, softmax_lse: Tensor, return_attn_probs: bool, return_softmax_lse: bool
) -> AttentionResult:
    if return_attn_probs:
        return out, softmax_lse, None
    if return_softmax_lse:
        return out, softmax_lse
    return out
