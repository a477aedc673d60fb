"""What the kernels compute, written for reading: the whole score matrix, one line for each term.

The formulas run in the dtype of their inputs. In float64 they are the reference; in a kernel's own
dtype they show the error that torch makes there, from which tolerances are derived.
"""

import math

import torch
from torch import Tensor


def visible_keys(seqlen_q, seqlen_k, causal=False, window_size=(-1, -1), device=None) -> Tensor:
    """(seqlen_q, seqlen_k) bool: row i stands at key i + seqlen_k - seqlen_q."""
    left, right = window_size
    if causal:
        right = 0
    position = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible &= key >= position - left
    if right >= 0:
        visible &= key <= position + right
    return visible


def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    s_aux=None,
    attn_bias=None,
    dropout_p=0.0,
    dropout_keep=None,
) -> tuple[Tensor, Tensor]:
    """Dense attention; ``(out, softmax_lse)`` in the layout and with the meaning of the kernels'.

    ``dropout_keep``: (batch_size, num_heads_q, seqlen_q, seqlen_k) bool.
    """
    group_size = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch_size, heads, seqlen, head_dim)
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(q.shape[-1])

    scores = q @ k.transpose(2, 3) * softmax_scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        row = torch.arange(seqlen_q, device=q.device)[:, None]
        key = torch.arange(seqlen_k, device=q.device)[None, :]
        distance = (row + seqlen_k - seqlen_q - key).abs()
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        scores = scores - slopes[:, :, None, None].to(scores.dtype) * distance
    visible = visible_keys(seqlen_q, seqlen_k, causal, window_size, q.device)
    if attn_bias is not None:
        bias = attn_bias.to(scores.dtype)
        visible = visible & ~torch.isneginf(bias)
        scores = scores + torch.where(torch.isneginf(bias), 0, bias)
    probabilities, softmax_lse = _softmax(scores, visible, s_aux)
    if dropout_p > 0:
        probabilities = probabilities * dropout_keep / (1 - dropout_p)
    return (probabilities @ v).transpose(1, 2), softmax_lse


def _softmax(scores, visible, s_aux) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys and the sink; a row without either is 0, its lse -inf."""
    visible = visible.expand(scores.shape)
    scores = scores.masked_fill(~visible, -math.inf)
    if s_aux is not None:
        sink = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, sink], dim=-1)
        probabilities = torch.softmax(logits, dim=-1)[..., :-1]
        return probabilities, torch.logsumexp(logits, dim=-1)
    # Rows without a key take part as rows of zeros, so that no NaN enters their gradient.
    has_key = visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~has_key, 0)
    probabilities = torch.softmax(scores, dim=-1).masked_fill(~has_key, 0)
    if scores.shape[-1] == 0:
        return probabilities, scores.sum(dim=-1) - math.inf
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~has_key.squeeze(-1), -math.inf)
    return probabilities, lse


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    alibi_slopes=None,
    attn_bias=None,
    dropout_keep=None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Packed attention: each sequence by itself; rows outside all sequences are 0, their lse -inf.

    ``dropout_keep``: a list of (num_heads_q, seqlen_q, seqlen_k) bool, one for each sequence.
    """
    outs, lses, covered = [], [], 0
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(bounds_q) - 1):
        rows = slice(bounds_q[index], bounds_q[index + 1])
        keys = slice(bounds_k[index], bounds_k[index + 1])
        terms = dict(options)
        if alibi_slopes is not None:
            terms["alibi_slopes"] = alibi_slopes[index] if alibi_slopes.dim() == 2 else alibi_slopes
        if attn_bias is not None:
            bias = attn_bias if attn_bias.shape[1] == 1 else attn_bias[:, rows]
            terms["attn_bias"] = bias[None, :, :, : keys.stop - keys.start]
        if dropout_keep is not None:
            terms["dropout_keep"] = dropout_keep[index][None]
        out, lse = attention(q[None, rows], k[None, keys], v[None, keys], **terms)
        outs.append(out[0])
        lses.append(lse[0])
        covered = rows.stop
    rest = q.shape[0] - covered
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def rotate(x, cos, sin, positions, interleaved) -> Tensor:
    """Rotary embedding of x (rows, heads, head_dim) at ``positions``, by rows of the tables."""
    pairs = cos.shape[1]
    cos, sin = (table[positions].to(x.dtype)[:, None] for table in (cos, sin))
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head[..., :pairs], head[..., pairs:]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    head = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([head, rest], dim=-1)


def cache_rows(batch, length, page_size=None, block_table=None, cache_batch_idx=None) -> tuple:
    """Entries and rows of a cache that hold positions 0 to length - 1 of one sequence."""
    positions = torch.arange(length)
    if block_table is not None:
        pages = block_table[batch].cpu()[positions // page_size]
        return pages.long(), positions % page_size
    entry = batch if cache_batch_idx is None else int(cache_batch_idx[batch])
    return torch.full_like(positions, entry), positions


def attention_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    *,
    cache_seqlens,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=True,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    alibi_slopes=None,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each sequence by itself: append, then attention to its rows of the cache. Gives ``(out,
    softmax_lse, k_cache, v_cache)``, the caches as copies."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    outs, lses = [], []
    advances = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    for batch in range(q.shape[0]):
        length = int(cache_seqlens if isinstance(cache_seqlens, int) else cache_seqlens[batch])
        rows_q, end = q[batch], length + (0 if k is None else k.shape[1])
        if length < 0:  # padding
            end = 0
        where = cache_rows(batch, end, k_cache.shape[1], block_table, cache_batch_idx)
        if k is not None and length >= 0:
            rows_k, new = k[batch], tuple(index[length:] for index in where)
            if rotary_cos is not None:
                tables = rotary_cos, rotary_sin
                at = torch.arange(length, end)
                rows_k = rotate(rows_k, *tables, at, rotary_interleaved)
                at = torch.arange(length, length + q.shape[1]) if advances else length
                at = torch.as_tensor(at).expand(q.shape[1])
                rows_q = rotate(rows_q, *tables, at, rotary_interleaved)
            k_cache[new], v_cache[new] = rows_k, v[batch]
        first = 0 if cache_leftpad is None or length < 0 else int(cache_leftpad[batch])
        keys, values = (x[tuple(i[first:] for i in where)] for x in (k_cache, v_cache))
        terms = dict(options)
        if alibi_slopes is not None:
            terms["alibi_slopes"] = alibi_slopes[batch] if alibi_slopes.dim() == 2 else alibi_slopes
        out, lse = attention(rows_q[None], keys[None], values[None], **terms)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), k_cache, v_cache


def philox_4x32_10(counter: list[Tensor], key: list[int]) -> list[Tensor]:
    """The four 32-bit outputs for each element of the four counter tensors (int64 tensors)."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (c & mask for c in counter)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & mask) ^ c1 ^ k0,
            product1 & mask,
            ((product0 >> 32) & mask) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def dropout_keep(rng_state, dropout_p, batch, num_heads_q, seqlen_q, seqlen_k) -> Tensor:
    """(num_heads_q, seqlen_q, seqlen_k) bool: the entries that dropout keeps in one sequence.

    Entry (row, key) takes one of the four numbers that Philox gives for the two positions with bit
    3 taken out; bit 3 of the row and bit 3 of the key choose which.
    """
    seed, offset = (int(value) % 2**64 for value in rng_state)
    keys = [seed & 0xFFFFFFFF, (seed >> 32) ^ (offset >> 32)]
    head = torch.arange(num_heads_q)[:, None, None]
    row = torch.arange(seqlen_q)[None, :, None]
    key = torch.arange(seqlen_k)[None, None, :]
    row, key, head = torch.broadcast_tensors(row, key, head)
    counter = [
        ((row >> 4) << 3) | (row & 7),
        ((key >> 4) << 3) | (key & 7),
        batch * num_heads_q + head,
        torch.full_like(row, offset & 0xFFFFFFFF),
    ]
    lanes = torch.stack(philox_4x32_10(counter, keys))
    lane = ((row >> 3) & 1) | (((key >> 3) & 1) << 1)
    bits = lanes.gather(0, lane[None])[0]
    as_kernels_see_it = torch.tensor(dropout_p, dtype=torch.float32).item()
    return bits >= int(as_kernels_see_it * 2**32)
