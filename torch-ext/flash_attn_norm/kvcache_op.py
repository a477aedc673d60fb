"""The ops of a key-value cache as torch sees them: fakes, and the call that all public functions
share. They have no gradient."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix, ops
from .arguments import (
    check_dropout_p,
    check_flag,
    check_number,
    check_tensor,
    check_window_size,
    counted,
    refuse_dtensor,
    refuse_forward_mode,
)
from .attention_op import checks_values
from .attention_shapes import check_attention_scalars
from .calls import call
from .kvcache_shapes import check_kvcache_numbers, check_kvcache_shapes
from .kvcache_transforms import refuse_functionalization

# How the packed functions name what the op calls otherwise.
_PACKED_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "cache_leftpad": "leftpad_k",
}


def check_inference(
    function: str, required: dict[str, Tensor], **optional: Optional[Tensor]
) -> None:
    """Refuses what is no plain tensor, None but for ``required`` ones apart, and a gradient that
    would silently stop here."""
    for name, tensor in required.items():
        _check_inference(function, name, tensor)
    for name, tensor in optional.items():
        if tensor is not None:
            _check_inference(function, name, tensor)
    if forward_ad._current_level >= 0:
        refuse_forward_mode(function, **required, **optional)


def _check_inference(function: str, name: str, tensor: Tensor) -> None:
    refuse_dtensor(name, tensor)
    check_tensor(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}.requires_grad is True, but {function} has no gradient; call it under "
            f"torch.no_grad() or torch.inference_mode(), or pass {name}.detach()"
        )


def check_paged(
    k_cache: Tensor, page_table: Optional[Tensor], renamed: Optional[dict[str, str]]
) -> None:
    """Ranks that are needed before the op can say what is wrong with the rest."""
    names = renamed or {}
    if page_table is not None and page_table.dim() != 2:
        raise ValueError(
            f"{names.get('block_table', 'block_table')} has shape {tuple(page_table.shape)}; it "
            "must be (batch_size, pages_per_sequence)"
        )
    if k_cache.dim() != 4:
        layout = "batch_size_cache, seqlen_cache" if page_table is None else "num_pages, page_size"
        raise ValueError(
            f"{names.get('k_cache', 'k_cache')} has shape {tuple(k_cache.shape)}, "
            f"{counted(k_cache.dim(), 'dimension')}; expected 4: ({layout}, num_heads_kv, head_dim)"
        )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Optional[Tensor],
    block_table: Tensor,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Optional[Tensor],
    s_aux: Optional[Tensor],
    attn_bias: Optional[Tensor],
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_varlen_func`` with a block table: keys on the pages of a cache. A ``seqused_k``
    says their number instead of ``cu_seqlens_k``, which may then be None."""
    if check_dropout_p(dropout_p) != 0:
        raise ValueError(f"dropout_p is {dropout_p} with a block_table; it must be 0")
    if attn_bias is not None:
        raise ValueError("attn_bias is given with a block_table; it must be None")
    check_inference(
        "flash_attn_varlen_func with a block_table",
        {
            "q": q,
            "k": k_cache,
            "v": v_cache,
            "cu_seqlens_q": cu_seqlens_q,
        },
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    check_paged(k_cache, block_table, _PACKED_NAMES)
    return attend(
        q,
        k_cache,
        v_cache,
        None,
        None,
        None,
        None,
        cu_seqlens_q,
        cu_seqlens_k if seqused_k is None else None,
        seqused_k,
        None,
        leftpad_k,
        block_table,
        alibi_slopes,
        s_aux,
        0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        False,
        0,
        _PACKED_NAMES,
    )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor],
    v: Optional[Tensor],
    rotary_cos: Optional[Tensor],
    rotary_sin: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    cache_seqlens: Optional[Tensor],
    cache_batch_idx: Optional[Tensor],
    cache_leftpad: Optional[Tensor],
    page_table: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    s_aux: Optional[Tensor],
    seqlen: int,
    softmax_scale: Optional[float],
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
    renamed: Optional[dict[str, str]],
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    k_descale_factor: float = 1.0,
    v_descale_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One call of the op that appends, or of the one that only reads; ``(out, softmax_lse)``.
    ``renamed`` is that of ``call``."""
    window_left, window_right = check_window_size(window_size)
    causal, softcap = check_flag("causal", causal), check_number("softcap", softcap)
    if softmax_scale is None:
        # A tensor without dimensions or without a head_dim goes on to the op, which refuses it.
        softmax_scale = q.shape[-1] ** -0.5 if q.dim() > 0 and q.shape[-1] > 0 else 1.0
    else:
        softmax_scale = check_number("softmax_scale", softmax_scale)
    if k is None:
        return call(
            ops.attention_kvcache,
            (
                q,
                k_cache,
                v_cache,
                cu_seqlens_q,
                cu_seqlens_k,
                cache_seqlens,
                cache_batch_idx,
                cache_leftpad,
                page_table,
                alibi_slopes,
                s_aux,
                seqlen,
                softmax_scale,
                causal,
                window_left,
                window_right,
                softcap,
                num_splits,
                checks_values(),
                k_descale,
                v_descale,
                k_descale_factor,
                v_descale_factor,
            ),
            renamed,
        )
    refuse_functionalization(k_cache, v_cache, q, k, v)
    results = call(
        ops.attention_kvcache_append,
        (
            k_cache,
            v_cache,
            q,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            alibi_slopes,
            s_aux,
            seqlen,
            softmax_scale,
            causal,
            window_left,
            window_right,
            softcap,
            rotary_interleaved,
            num_splits,
            checks_values(),
            k_descale,
            v_descale,
            k_descale_factor,
            v_descale_factor,
        ),
        renamed,
    )
    _note_writes(k_cache, v_cache)
    return results


def _note_writes(*caches: Tensor) -> None:
    """As torch's own in-place functions do, so that a backward pass that has saved a cache raises
    instead of reading the new rows. A compiler notes it by the op's schema."""
    if torch.compiler.is_compiling():
        return
    noted = [cache for cache in caches if not cache.is_inference()]
    if noted:
        torch.autograd.graph.increment_version(noted)


@torch.library.register_fake(add_op_namespace_prefix("attention_kvcache"))
def _attention_kvcache_fake(
    q,
    k_cache,
    v_cache,
    cu_seqlens_q,
    cu_seqlens_k,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    page_table,
    alibi_slopes,
    s_aux,
    seqlen,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    num_splits,
    check_values,
    k_descale=None,
    v_descale=None,
    k_descale_factor=1.0,
    v_descale_factor=1.0,
):
    check_kvcache_shapes(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    check_attention_scalars(softmax_scale, window_left, window_right, softcap)
    has_lengths = cache_seqlens is not None or cu_seqlens_k is not None
    check_kvcache_numbers(seqlen, num_splits, k_cache, None, page_table, has_lengths)
    return _empty_results(q, v_cache, packed=cu_seqlens_q is not None)


@torch.library.register_fake(add_op_namespace_prefix("attention_kvcache_append"))
def _attention_kvcache_append_fake(
    k_cache,
    v_cache,
    q,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    page_table,
    alibi_slopes,
    s_aux,
    seqlen,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    rotary_interleaved,
    num_splits,
    check_values,
    k_descale=None,
    v_descale=None,
    k_descale_factor=1.0,
    v_descale_factor=1.0,
):
    check_kvcache_shapes(
        q,
        k_cache,
        v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    check_attention_scalars(softmax_scale, window_left, window_right, softcap)
    has_lengths = cache_seqlens is not None
    check_kvcache_numbers(seqlen, num_splits, k_cache, k, page_table, has_lengths)
    return _empty_results(q, v_cache, packed=False)


def _empty_results(q: Tensor, v_cache: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]))
    # (num_heads_q, total_q) packed, (batch_size, num_heads_q, seqlen_q) dense
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)
