"""What the ops of a key-value cache refuse by devices, dtypes, shapes and numbers alone, for their
fakes: a call on "meta" tensors and a trace end with the errors of a real call."""

from typing import Optional

import torch
from torch import Tensor

from .arguments import counted
from .attention_shapes import check_head_terms
from .fake_checks import FLOAT_DTYPES, is_known, refuse_other_devices, require, transposed_text

_MAX_HEAD_DIM = 512
_OTHER_FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_MAX_FLOAT8_HEAD_DIM = 256  # on a GPU
_LATENT = (576, 512)  # multi-head latent attention
_TWICE = (
    ". It seems to hold each angle twice, as the tables of Transformers do: pass "
    "rotary_cos[:, :rotary_dim // 2], rotary_sin likewise, and rotary_interleaved=False"
)
_TABLE_SHAPE = "(seqlen_rotary, rotary_dim / 2), with a row for each position from 0 on"
_CURE_OF_A_CACHE = "cast q, or make the cache in q's"


def check_kvcache_shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    cache_seqlens: Optional[Tensor] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    s_aux: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> None:
    """Raises the op's ValueError for tensors that do not go together."""
    cumulative = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    per_sequence = {
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    new = {"k": k, "v": v}
    refuse_other_devices(
        "q",
        q,
        **caches,
        **new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        **cumulative,
        **per_sequence,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    _check_cache_dtypes(q, k_cache, v_cache)
    _check_dtypes(q, **new)
    packed = cu_seqlens_q is not None
    _check_rank("q", q, 3 if packed else 4)
    for name, tensor in {**caches, **new}.items():
        _check_rank(name, tensor, 4)
    _check_sizes(q, k_cache, v_cache, paged=block_table is not None)
    for name, tensor in cumulative.items():
        _check_index_tensor(name, tensor, "(batch_size + 1,)", None)
    batch_size = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    for name, tensor in per_sequence.items():
        _check_index_tensor(name, tensor, "(batch_size,)", batch_size)
    if block_table is not None:
        _check_table(block_table, cache_batch_idx, batch_size)
    _check_float8_sizes(q, k_cache, v_cache)
    for name, values in (("k_descale", k_descale), ("v_descale", v_descale)):
        if values is not None:
            _check_descale(name, values, k_cache, batch_size)
    if k is not None:
        _check_new_rows(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    check_head_terms(q.shape[-2], batch_size, alibi_slopes, s_aux)


def check_kvcache_numbers(
    seqlen: int,
    num_splits: int,
    k_cache: Tensor,
    k: Optional[Tensor],
    block_table: Optional[Tensor],
    has_lengths: bool,
) -> None:
    """Likewise for numbers that no other attention has. ``has_lengths``: a tensor says how many
    rows a sequence has, and ``seqlen`` is added to it."""
    if is_known(num_splits) and not 0 <= num_splits < 2**31:
        raise ValueError(
            f"num_splits is {num_splits}; it must lie between 0 (own choice) and 2147483647"
        )
    if is_known(seqlen) and seqlen < 0:
        raise ValueError(f"cache_seqlens is {seqlen}; it must be at least 0")
    page_size = k_cache.shape[1]
    pages = 1 if block_table is None else block_table.shape[1]
    new = 0 if k is None else k.shape[1]
    room, needed = pages * page_size, seqlen + new
    if has_lengths or not is_known(room) or not is_known(needed) or needed <= room:
        return
    where = f"the cache has {counted(room, 'row')} for each sequence"
    if block_table is not None:
        where = f"the page table has room for {room} ({counted(pages, 'page')} of {page_size})"
    if k is None:
        raise ValueError(f"cache_seqlens is {seqlen}, but {where}")
    raise ValueError(
        f"cache_seqlens is {seqlen} and k has {counted(new, 'new row')}, but {where}; nothing was "
        "appended"
    )


def _check_cache_dtypes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dtype == torch.float8_e4m3fn:
        raise ValueError(
            f"q has dtype {q.dtype}; it must be torch.bfloat16, torch.float16 or, on the CPU, "
            "torch.float32: only a cache may be float8"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype == torch.uint8:
            raise ValueError(
                f"{name} has dtype {cache.dtype}; pass bytes of float8 elements as "
                f"{name}.view(torch.float8_e4m3fn), which copies nothing, and another cache in q's "
                f"dtype, {q.dtype}"
            )
        if cache.dtype in _OTHER_FLOAT8:
            raise ValueError(
                f"{name} has dtype {cache.dtype}; of the float8 dtypes a cache may have "
                "torch.float8_e4m3fn alone"
            )
        if cache.dtype != torch.float8_e4m3fn:
            _check_dtypes(q, **{name: cache})
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache has dtype {k_cache.dtype} and v_cache has {v_cache.dtype}; they must have "
            "one dtype"
        )


def _check_dtypes(q: Tensor, **tensors: Optional[Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != q.dtype:
            is_new = name in ("k", "v")
            cure = f"cast {name}, {name}.to({q.dtype})" if is_new else _CURE_OF_A_CACHE
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and q has {q.dtype}; they must have one dtype: "
                f"{cure}"
            )
    if q.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"q and the cache have dtype {q.dtype}; allowed are torch.bfloat16, torch.float16 and, "
            "on the CPU, torch.float32"
        )


def _check_rank(name: str, tensor: Optional[Tensor], rank: int) -> None:
    if tensor is not None and tensor.dim() != rank:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {counted(tensor.dim(), 'dimension')}; "
            f"expected {rank}"
        )


def _check_table_rank(name: str, table: Tensor) -> None:
    if table.dim() == 2:
        return
    hint = ""
    if table.dim() == 3:
        hint = (
            ". It seems to be a table of Transformers, which holds each angle twice: if it starts "
            f"at position 0, pass {name}[0, :, :{table.shape[2] // 2}], the other likewise, and "
            "rotary_interleaved=False"
        )
    raise ValueError(
        f"{name} has shape {tuple(table.shape)}, {counted(table.dim(), 'dimension')}; expected 2: "
        f"{_TABLE_SHAPE}{hint}"
    )


def _check_sizes(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool) -> None:
    k_shape, v_shape = k_cache.shape, v_cache.shape
    require(
        (k_shape[0] == v_shape[0]) & (k_shape[1] == v_shape[1]) & (k_shape[2] == v_shape[2]),
        lambda: (
            f"k_cache has shape {tuple(k_shape)} and v_cache has shape {tuple(v_shape)}; all but "
            "the last dimension must be equal"
        ),
    )
    num_heads_q, num_heads_kv = q.shape[-2], k_shape[2]
    if num_heads_kv < 1 or num_heads_q < 1 or num_heads_q % num_heads_kv != 0:
        layout = "num_pages, page_size" if paged else "batch_size_cache, seqlen_cache"
        hint = transposed_text("k_cache", k_cache, f"({layout}, num_heads_kv, head_dim)")
        rows = k_shape[1]
        transposed = 0 < rows < num_heads_kv and num_heads_q > 0 and num_heads_q % rows == 0
        raise ValueError(
            f"q has {counted(num_heads_q, 'head')} and the cache has {num_heads_kv}; num_heads_q "
            "must be a positive multiple of num_heads_kv"
            f"{hint + ', and v_cache likewise' if transposed else ''}"
        )
    head_dim, head_dim_v = q.shape[-1], v_shape[3]
    require(
        k_shape[3] == head_dim,
        lambda: (
            f"q has head_dim {head_dim} and k_cache has head_dim {k_shape[3]}; they must be equal "
            "(only that of v_cache may differ)"
        ),
    )
    if (head_dim, head_dim_v) == _LATENT:
        return
    for name, size in (("q and k_cache have", head_dim), ("v_cache has", head_dim_v)):
        if size < 1 or size > _MAX_HEAD_DIM:
            raise ValueError(
                f"{name} head_dim {size}; allowed are 1 to {_MAX_HEAD_DIM}, and {_LATENT[0]} with "
                f"{_LATENT[1]} in v_cache"
            )


def _check_index_tensor(
    name: str, tensor: Optional[Tensor], shape: str, size: Optional[int]
) -> None:
    if tensor is None:
        return
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be torch.int32")
    fits = tensor.dim() == 1
    if fits and size is not None:
        fits = tensor.shape[0] == size
    require(fits, lambda: f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")


def _check_table(block_table: Tensor, cache_batch_idx: Optional[Tensor], batch_size: int) -> None:
    if block_table.dtype != torch.int32 or block_table.dim() != 2:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)} and dtype {block_table.dtype}; it "
            "must be torch.int32 of shape (batch_size, pages_per_sequence)"
        )
    require(
        block_table.shape[0] == batch_size,
        lambda: (
            f"block_table has shape {tuple(block_table.shape)}; it must have a row for each "
            f"sequence, batch_size = {batch_size}"
        ),
    )
    if cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and block_table are both given; pass the table alone")


def _transposed_rows_text(name: str, rows: Tensor, cache: Tensor) -> str:
    """What the refusal of new rows adds if they, or the cache, seem to have their heads first."""
    if rows.shape[1] == cache.shape[2]:
        return f"; {name} looks transposed, pass {name}.transpose(1, 2)"
    if rows.shape[2] == cache.shape[1]:
        return f"; {name}_cache looks transposed, pass {name}_cache.transpose(1, 2)"
    return ""


def _check_float8_sizes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dtype != torch.float8_e4m3fn or q.device.type != "cuda":
        return
    if max(k_cache.shape[3], v_cache.shape[3]) > _MAX_FLOAT8_HEAD_DIM:
        raise ValueError(
            f"head_dim = {k_cache.shape[3]} and head_dim_v = {v_cache.shape[3]} are not supported "
            f"with a float8 cache on a GPU; they must be at most {_MAX_FLOAT8_HEAD_DIM}"
        )


def _check_descale(name: str, values: Tensor, k_cache: Tensor, batch_size: int) -> None:
    if k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} is given, but k_cache has dtype {k_cache.dtype}; it belongs to a cache of "
            "torch.float8_e4m3fn: pass None"
        )
    if values.dtype != torch.float32:
        raise ValueError(f"{name} has dtype {values.dtype}; it must be torch.float32")
    expected = (batch_size, k_cache.shape[2])
    fits = values.dim() <= 2
    for found, size in zip(reversed(values.shape), reversed(expected)):
        fits = fits & (found == size)
    require(
        fits,
        lambda: (
            f"{name} has shape {tuple(values.shape)}; it must be a number, (num_heads_kv,) = "
            f"({expected[1]},) or (batch_size, num_heads_kv) = {expected}"
        ),
    )


def _check_new_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    rotary_cos: Optional[Tensor],
    rotary_sin: Optional[Tensor],
) -> None:
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (q.shape[0], k.shape[1], *cache.shape[2:])
        fits = True
        for found, size in zip(rows.shape, expected):
            fits = fits & (found == size)
        require(
            fits,
            lambda name=name, rows=rows, cache=cache, expected=expected: (
                f"{name} has shape {tuple(rows.shape)}; it must be (batch_size, seqlen_new, "
                f"num_heads_kv, head_dim) = {tuple(expected)}"
                f"{_transposed_rows_text(name, rows, cache)}"
            ),
        )
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_cos" if rotary_cos is None else "rotary_sin"
        raise ValueError(f"{missing} is missing; a rotation takes both rotary_cos and rotary_sin")
    if rotary_cos is None:
        return
    _check_table_rank("rotary_cos", rotary_cos)
    _check_table_rank("rotary_sin", rotary_sin)
    if rotary_cos.dtype != rotary_sin.dtype or rotary_cos.dtype not in (q.dtype, torch.float32):
        raise ValueError(
            f"rotary_cos has dtype {rotary_cos.dtype} and rotary_sin has {rotary_sin.dtype}; both "
            f"must be torch.float32 or both q's, {q.dtype}"
        )
    require(
        (rotary_cos.shape[0] == rotary_sin.shape[0]) & (rotary_cos.shape[1] == rotary_sin.shape[1]),
        lambda: (
            f"rotary_cos has shape {tuple(rotary_cos.shape)} and rotary_sin has shape "
            f"{tuple(rotary_sin.shape)}; they must be equal"
        ),
    )
    require(
        (rotary_cos.shape[0] >= 1)
        & (rotary_cos.shape[1] >= 1)
        & (2 * rotary_cos.shape[1] <= k_cache.shape[3]),
        lambda: (
            f"rotary_cos has shape {tuple(rotary_cos.shape)}; it must have a row for each position "
            "and rotary_dim / 2 columns, rotary_dim being at most head_dim, "
            f"{k_cache.shape[3]}{_TWICE if rotary_cos.shape[1] == k_cache.shape[3] else ''}"
        ),
    )
