"""Devices, dtypes, shapes and numbers that the attention ops refuse, for their fakes: a call on
"meta" tensors and a trace end with the errors of a real call."""

import math
from typing import Optional

import torch
from torch import Tensor

from .arguments import counted
from .fake_checks import (
    FLOAT_DTYPES,
    in_float32,
    is_known,
    refuse_other_devices,
    require,
    transposed_text,
)

_MAX_HEAD_DIM = 512
_MOST_HEADS = 256  # that a model is believed to have
_SHAPES = {
    False: {
        "q": "(batch_size, seqlen_q, num_heads_q, head_dim)",
        "k": "(batch_size, seqlen_k, num_heads_kv, head_dim)",
        "v": "(batch_size, seqlen_k, num_heads_kv, head_dim_v)",
        "attn_bias": "(1 or batch_size, 1 or num_heads_q, 1 or seqlen_q, seqlen_k)",
    },
    True: {
        "q": "(total_q, num_heads_q, head_dim)",
        "k": "(total_k, num_heads_kv, head_dim)",
        "v": "(total_k, num_heads_kv, head_dim_v)",
        "attn_bias": "(1 or num_heads_q, 1 or total_q, max_seqlen_k)",
    },
}


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    s_aux: Optional[Tensor],
    attn_bias: Optional[Tensor],
    rng_state: Optional[Tensor],
) -> None:
    """Raises the op's ValueError for tensors that do not go together."""
    extras = {"alibi_slopes": alibi_slopes, "s_aux": s_aux, "attn_bias": attn_bias}
    indices = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    refuse_other_devices("q", q, k=k, v=v, **indices, **extras, rng_state=rng_state)
    for name, value in (("k", k), ("v", v)):
        if value.dtype == torch.float8_e4m3fn:
            raise ValueError(
                f"{name} has dtype {value.dtype}; float8 keys and values are a cache's: "
                "flash_attn_with_kvcache takes them as k_cache and v_cache, with k_descale and "
                "v_descale, beside q in torch.bfloat16 or torch.float16"
            )
    require(
        q.dtype == k.dtype == v.dtype,
        lambda: (
            f"q, k and v must have one dtype, but q is {q.dtype}, k is {k.dtype} and v is "
            f"{v.dtype}; cast them to one, e.g. q.to(v.dtype) and k.to(v.dtype)"
        ),
    )
    require(
        q.dtype in FLOAT_DTYPES,
        lambda: f"q, k and v have dtype {q.dtype}; allowed are torch.bfloat16 and torch.float16",
    )
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_rank(name, value, packed)
    _check_sizes(q, k, v, packed)
    batch_size = q.shape[0]
    if packed:
        for name, value in indices.items():
            _check_index_tensor(name, value)
        batch_size = cu_seqlens_q.shape[0] - 1
    _check_extras(q, k, packed, batch_size, **extras)


def check_attention_scalars(
    softmax_scale: float, window_left: int, window_right: int, softcap: float
) -> None:
    """Raises the ops' ValueError for a number outside its range."""
    if is_known(softmax_scale) and not math.isfinite(in_float32(softmax_scale)):
        raise ValueError(f"softmax_scale is {softmax_scale:g}; it must be a finite number")
    if any(is_known(bound) and bound < -1 for bound in (window_left, window_right)):
        raise ValueError(
            f"window_size is ({window_left}, {window_right}); an entry must be -1 (no bound) or at "
            "least 0"
        )
    if is_known(softcap) and not (softcap == 0 or 0 < in_float32(softcap) < math.inf):
        raise ValueError(f"softcap is {softcap:g}; it must be 0 (off) or a positive finite number")


def check_dropout(dropout_p: float, rng_state: Optional[Tensor]) -> None:
    """Likewise for a probability and the state of its mask."""
    if is_known(dropout_p) and not 0 <= in_float32(dropout_p) < 1:
        raise ValueError(f"dropout_p is {dropout_p:g}; it must lie in [0, 1)")
    if is_known(dropout_p) and dropout_p > 0 and rng_state is None:
        raise ValueError(
            f"rng_state is missing; with dropout_p {dropout_p:g} the op takes the seed and the "
            "offset of the mask, torch.int64 of shape (2,)"
        )
    if rng_state is not None and (rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,)):
        raise ValueError(
            f"rng_state has dtype {rng_state.dtype} and shape {tuple(rng_state.shape)}; it must be "
            "torch.int64 of shape (2,), contiguous"
        )


def refuse_mask(q: Tensor, k: Tensor, cu_seqlens_q: Optional[Tensor], attn_bias: Tensor) -> None:
    """Refuses a mask in a bias's place with what makes a bias of it. One of integers that is no
    padding mask is the op's matter, as what does not go together otherwise."""
    packed = cu_seqlens_q is not None
    if q.dim() != (3 if packed else 4) or k.dim() != q.dim():
        return
    if cu_seqlens_q is not None and cu_seqlens_q.dim() != 1:
        return
    shape, is_bool = tuple(attn_bias.shape), attn_bias.dtype is torch.bool
    needed = f"torch.float32 or q's, of shape {_SHAPES[packed]['attn_bias']}"
    said = f"attn_bias has dtype {attn_bias.dtype} and shape {shape}"
    batch_size = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    is_padding = len(shape) == 2 and shape[0] == batch_size and (packed or shape[1] == k.shape[1])
    if is_padding and not (is_bool and shape[0] == q.shape[-3]):
        raise ValueError(
            f"{said}, as a padding mask has it, (batch_size, seqlen_k); it must be {needed}. Leave "
            "the padding out instead: pack the sequences and call flash_attn_varlen_func with "
            "their cu_seqlens_q and cu_seqlens_k, and with seqused_k where only the first keys of "
            "each are used"
        )
    if is_bool:
        lacking = len(_SHAPES[packed]["attn_bias"].split(", ")) - len(shape)
        index = f"[{', '.join(['None'] * lacking)}]" if lacking > 0 else ""
        raise ValueError(
            f"{said}, a mask; it must be {needed}, as it is added to the scores. Of a mask that is "
            "True at the keys that a row sees: torch.zeros(mask.shape, dtype=q.dtype, "
            f"device=q.device).masked_fill(~mask, float('-inf')){index}"
        )


def _check_rank(name: str, tensor: Tensor, packed: bool) -> None:
    rank = 3 if packed else 4
    if tensor.dim() != rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {counted(tensor.dim(), 'dimension')}; "
            f"expected {rank}: {_SHAPES[packed][name]}"
        )


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    if not packed:
        require(
            (k.shape[0] == q.shape[0]) & (v.shape[0] == q.shape[0]),
            lambda: (
                f"q, k and v have batch sizes {q.shape[0]}, {k.shape[0]} and {v.shape[0]}; they "
                "must be equal"
            ),
        )
    require(
        k.shape[-3] == v.shape[-3],
        lambda: (
            f"k has {counted(k.shape[-3], 'row')} and v has {v.shape[-3]} (k {tuple(k.shape)}, v "
            f"{tuple(v.shape)}); they must be equal"
        ),
    )
    num_heads_q, num_heads_kv = q.shape[-2], k.shape[-2]
    require(
        v.shape[-2] == num_heads_kv,
        lambda: (
            f"k has {counted(num_heads_kv, 'head')} and v has {v.shape[-2]}; they must be equal"
        ),
    )
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv != 0:
        hint = transposed_text("q", q, _SHAPES[False]["q"]) + ", and k and v likewise"
        transposed = not packed and _look_transposed(q, k)
        raise ValueError(
            f"q has {counted(num_heads_q, 'head')} and k and v have {num_heads_kv}; num_heads_q "
            f"must be a positive multiple of num_heads_kv{hint if transposed else ''}"
        )
    require(
        q.shape[-1] == k.shape[-1],
        lambda: (
            f"q has head_dim {q.shape[-1]} and k has head_dim {k.shape[-1]}; they must be equal "
            "(only v may differ)"
        ),
    )
    for name, tensor in (("q and k have", q), ("v has", v)):
        head_dim = tensor.shape[-1]
        if head_dim < 1 or head_dim > _MAX_HEAD_DIM:
            raise ValueError(f"{name} head_dim {head_dim}; allowed are 1 to {_MAX_HEAD_DIM}")


def _look_transposed(q: Tensor, k: Tensor) -> bool:
    """Whether heads seem to come before rows: those of q would divide then, and be fewer than the
    rows. Where q and k would have equally many, they may as well be short sequences, unless the
    other reading is absurd."""
    rows, heads = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
    if min(rows) < 1 or rows[0] % rows[1] != 0 or max(rows) >= max(heads):
        return False
    return rows[0] != rows[1] or heads[0] < heads[1] or heads[0] > _MOST_HEADS


def _check_index_tensor(name: str, tensor: Optional[Tensor]) -> None:
    if tensor is None:
        raise ValueError(
            f"{name} is missing; packed attention takes both cu_seqlens_q and cu_seqlens_k"
        )
    if tensor.dim() != 1 or tensor.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; it must be "
            "torch.int32 of shape (batch_size + 1,)"
        )


def check_head_terms(
    num_heads_q: int, batch_size: int, alibi_slopes: Optional[Tensor], s_aux: Optional[Tensor]
) -> None:
    if alibi_slopes is not None:
        if alibi_slopes.dtype != torch.float32:
            raise ValueError(
                f"alibi_slopes has dtype {alibi_slopes.dtype}; it must be torch.float32"
            )
        allowed = [(num_heads_q,), (batch_size, num_heads_q)]
        if tuple(alibi_slopes.shape) not in allowed:
            raise ValueError(
                f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; allowed are (num_heads_q,) = "
                f"{allowed[0]} and (batch_size, num_heads_q) = {allowed[1]}"
            )
    if s_aux is not None and s_aux.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"s_aux has dtype {s_aux.dtype}; allowed are torch.float32, torch.float16 and "
            "torch.bfloat16"
        )
    if s_aux is not None and tuple(s_aux.shape) != (num_heads_q,):
        raise ValueError(
            f"s_aux has shape {tuple(s_aux.shape)}; it must be (num_heads_q,) = ({num_heads_q},)"
        )


def _check_extras(
    q: Tensor,
    k: Tensor,
    packed: bool,
    batch_size: int,
    alibi_slopes: Optional[Tensor],
    s_aux: Optional[Tensor],
    attn_bias: Optional[Tensor],
) -> None:
    num_heads_q = q.shape[-2]
    check_head_terms(num_heads_q, batch_size, alibi_slopes, s_aux)
    if attn_bias is None:
        return
    if attn_bias.dtype not in (q.dtype, torch.float32):
        raise ValueError(
            f"attn_bias has dtype {attn_bias.dtype}; it must be torch.float32 or q's, {q.dtype}"
        )
    sizes = (num_heads_q, q.shape[0]) if packed else (batch_size, num_heads_q, q.shape[1])
    fits = attn_bias.dim() == len(sizes) + 1
    if fits:
        for found, size in zip(attn_bias.shape, sizes):
            fits = fits & ((found == 1) | (found == size))
        if not packed:
            fits = fits & (attn_bias.shape[-1] == k.shape[1])
    require(
        fits,
        lambda: (
            f"attn_bias has shape {tuple(attn_bias.shape)}; it must be "
            f"{_SHAPES[packed]['attn_bias']}"
        ),
    )
