"""Attention to a key-value cache with FlashAttention-2's function, for decoding."""

from collections.abc import Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from .arguments import check_flag, check_number, check_whole_number
from .fake_checks import is_known
from .kvcache_op import attend, check_inference, check_paged

_FLOAT32 = torch.finfo(torch.float32)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Optional[Tensor] = None,
    s_aux: Optional[Tensor] = None,
    k_descale: Optional[Union[float, Tensor]] = None,
    v_descale: Optional[Union[float, Tensor]] = None,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Softmax attention to a key-value cache, after new rows were written into it.

    The keys of sequence b are rows ``cache_leftpad[b]`` to ``cache_seqlens[b] + seqlen_new`` of its
    cache. Query row i stands at key ``i + seqlen_k - seqlen_q`` of these: causal masks and windows
    are aligned bottom-right, scores are those of ``flash_attn_func``, and so are the results of a
    row that sees no key. Rows and pages that no sequence uses are neither read nor written,
    whatever they hold.

    ``k`` and ``v`` are written in place, at rows ``cache_seqlens[b]`` and on. Nothing else of the
    cache changes, and an error means that nothing was written. Between calls the cache may be
    changed at will; ``cache_seqlens`` is the caller's to raise.

    No gradient: an input that requires one is refused while gradients are recorded.

    Args:
        q: (batch_size, seqlen_q, num_heads_q, head_dim); bfloat16, float16 or, on the CPU only,
            float32. seqlen_q is usually 1, but may be any length.
        k_cache: (batch_size_cache, seqlen_cache, num_heads_kv, head_dim), or with ``block_table``
            (num_pages, page_size, num_heads_kv, head_dim); dtype of ``q``, or float8_e4m3fn; the
            last dimension of unit stride, otherwise any strides. head_dim is 1 to 512, or 576 with
            head_dim_v 512; of a float8 cache on a GPU 1 to 256. There each call copies one whose
            rows are not aligned to 16 bytes, as those of a head_dim that is no multiple of 8
            (float8: 16).
        v_cache: likewise with head_dim_v. It may be a part of ``k_cache``'s memory if nothing is
            appended.
        k: (batch_size, seqlen_new, num_heads_kv, head_dim), rows to append, at ``cache_seqlens``,
            in the dtype of ``q``.
        v: (batch_size, seqlen_new, num_heads_kv, head_dim_v).
        rotary_cos: (seqlen_rotary, rotary_dim / 2), dtype of ``q`` or float32: rotates the first
            rotary_dim elements of ``k`` before it is written, and of ``q``. Row r of ``k`` stands
            at position ``cache_seqlens[b] + r``; row i of ``q`` at ``cache_seqlens[b] + i`` under a
            causal mask or a window and at ``cache_seqlens[b]`` otherwise.
        rotary_sin: likewise.
        cache_seqlens: rows in the cache before the call: (batch_size,), int32, or an int for all
            sequences; None: seqlen_cache. A negative entry of a tensor marks a row of padding, as
            fixed batches have them: nothing is appended there, out is 0, softmax_lse -inf (or
            its sink).
        cache_batch_idx: (batch_size,), int32, which row of the cache each sequence has; None: its
            own. Not with a page table.
        cache_leftpad: (batch_size,), int32, rows in front of the first key.
        block_table: (batch_size, pages_per_sequence), int32: the pages of each sequence, of any
            size from 1 row on. Entries behind its last row are not read.
        softmax_scale: factor of q . k, finite; None means ``head_dim ** -0.5``.
        causal: whether a row sees no key behind its own position.
        window_size: (left, right), how many keys before and behind its position a row sees; -1 is
            no bound.
        softcap: if positive, scores become ``softcap * tanh(score / softcap)``; 0 is off.
        rotary_interleaved: whether neighbours rotate together, elements 0 and 1, 2 and 3, ...;
            False: those of the two halves of rotary_dim.
        alibi_slopes: (num_heads_q,) or (batch_size, num_heads_q), float32.
        num_splits: into how many parts at most the keys of a sequence are cut, to be worked on at
            the same time; 0 chooses.
        return_softmax_lse: returns ``(out, softmax_lse)``.
        page_table: another name of ``block_table``, FlashAttention-3's.
        s_aux: (num_heads_q,), the attention sink of each head; float32, bfloat16 or float16.
        k_descale: what the elements of a float8 ``k_cache`` are multiplied with, as in
            FlashAttention-3: positive, a float or float32 of shape (), (num_heads_kv,) or
            (batch_size, num_heads_kv); None is 1. New rows are divided by it, after their rotation,
            and rounded to nearest even; what then exceeds 448 becomes 448, and NaN stays NaN.
        v_descale: likewise for ``v_cache``.

    Returns:
        out, (batch_size, seqlen_q, num_heads_q, head_dim_v), dtype of ``q``, contiguous; with
        ``return_softmax_lse`` also softmax_lse, (batch_size, num_heads_q, seqlen_q), float32.

    Raises:
        ValueError: an argument that is not as above; the text names it, its value and what is
            allowed. Values of index tensors, and with them rows behind the cache's capacity, are
            checked on the CPU; on a GPU they are clamped, which leaves out rows that do not fit,
            and ``check_inputs(True)`` turns on the check. An int is always checked.
    """
    if block_table is not None and page_table is not None:
        raise ValueError(
            "block_table and page_table are both given; they are two names of one table"
        )
    return_softmax_lse = check_flag("return_softmax_lse", return_softmax_lse)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing} is missing; k and v are appended together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is missing; it says where k and v are to be appended")
    if k is None and (rotary_cos is not None or rotary_sin is not None):
        raise ValueError(
            "rotary_cos and rotary_sin are given without k; a rotation belongs to an append: "
            "without one, rotate q yourself"
        )
    check_inference(
        "flash_attn_with_kvcache",
        {"q": q, "k_cache": k_cache, "v_cache": v_cache},
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens if isinstance(cache_seqlens, Tensor) else None,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        block_table=block_table,
        page_table=page_table,
        k_descale=k_descale if isinstance(k_descale, Tensor) else None,
        v_descale=v_descale if isinstance(v_descale, Tensor) else None,
    )
    renamed = None if page_table is None else {"block_table": "page_table"}
    page_table = block_table if page_table is None else page_table
    check_paged(k_cache, page_table, renamed)
    k_descale, k_factor = _descale("k_descale", k_descale, k_cache)
    v_descale, v_factor = _descale("v_descale", v_descale, v_cache)
    lengths, seqlen = _lengths(cache_seqlens, k_cache, page_table)
    out, softmax_lse = attend(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        None,
        None,
        lengths,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        alibi_slopes,
        s_aux,
        seqlen,
        softmax_scale,
        causal,
        window_size,
        softcap,
        check_flag("rotary_interleaved", rotary_interleaved),
        check_whole_number("num_splits", num_splits),
        renamed,
        k_descale,
        v_descale,
        k_factor,
        v_factor,
    )
    return (out, softmax_lse) if return_softmax_lse else out


def _descale(
    name: str, value: Optional[Union[float, Tensor]], cache: Tensor
) -> tuple[Optional[Tensor], float]:
    """A tensor, and a factor beside it."""
    if value is None:
        return None, 1.0
    if cache.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} is given, but {name[0]}_cache has dtype {cache.dtype}; it belongs to a cache "
            "of torch.float8_e4m3fn: pass None"
        )
    if isinstance(value, Tensor):
        return value, 1.0
    factor = check_number(name, value)
    if is_known(factor) and not _FLOAT32.tiny <= factor <= _FLOAT32.max:
        raise ValueError(f"{name} is {factor:g}; it must be a positive number that float32 holds")
    return None, factor


def _lengths(
    cache_seqlens: Optional[Union[int, Tensor]], k_cache: Tensor, page_table: Optional[Tensor]
) -> tuple[Optional[Tensor], int]:
    """A tensor of lengths and what is added to them; or None and the length of all sequences."""
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        return cache_seqlens, 0
    if cache_seqlens is not None:
        what = "an int or an int32 tensor of shape (batch_size,)"
        return None, check_whole_number("cache_seqlens", cache_seqlens, what)
    pages = 1 if page_table is None else page_table.shape[1]
    return None, check_whole_number("k_cache's rows", pages * k_cache.shape[1])
