"""Makes caches in which everything that no sequence uses is poisoned, and compares a call with the
reference: results by the rules of errors.py, and what was written into the cache."""

import math

import reference
import torch
from errors import (
    LSE_TOLERANCE,
    assert_same_bits,
    assert_within,
    float32_tolerance,
    poisoned_memory,
    tolerance,
)

FAR_OUTSIDE = 2**31 - 1  # in entries of a page table that are not to be read


def lengths_tensor(lengths, place) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=place["device"])


def random_pages(lengths, page_size, place, more_pages=2) -> torch.Tensor:
    """A page table for these lengths over shuffled pages; the last entries lead far outside."""
    counts = [math.ceil(max(length, 0) / page_size) for length in lengths]
    order = torch.randperm(sum(counts) + more_pages)
    table = torch.full((len(lengths), max([*counts, 1]) + 1), FAR_OUTSIDE, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    return table.to(place["device"])


def make_case(
    place,
    lengths,
    seqlen_q=1,
    seqlen_new=0,
    heads=(4, 2),
    head_dim=64,
    head_dim_v=None,
    page_size=None,
    leftpad=None,
    shuffled=False,
) -> dict:
    """Arguments of a call. ``lengths`` are rows in the cache before it; ``leftpad`` rows in front
    of the first key hold NaN, as all rows of the cache that are not used; ``shuffled`` gives the
    sequences rows of a larger cache by cache_batch_idx."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    num_heads_q, num_heads_kv = heads
    batch_size = len(lengths)
    ends = [length + seqlen_new for length in lengths]
    case = {
        "q": torch.randn(batch_size, seqlen_q, num_heads_q, head_dim, **place),
        "cache_seqlens": lengths_tensor(lengths, place),
    }
    if page_size is None:
        shape = (batch_size + (2 if shuffled else 0), max([*ends, 0]) + 3)
    else:
        case["block_table"] = random_pages(ends, page_size, place)
        used = sum(math.ceil(max(end, 0) / page_size) for end in ends)
        shape = (used + 2, page_size)
    if shuffled:
        case["cache_batch_idx"] = lengths_tensor(
            torch.randperm(batch_size + 2)[:batch_size].tolist(), place
        )
    if leftpad is not None:
        case["cache_leftpad"] = lengths_tensor(leftpad, place)
    for name, dim in (("k_cache", head_dim), ("v_cache", head_dim_v)):
        cache = torch.full((*shape, num_heads_kv, dim), math.nan, **place)
        for batch, length in enumerate(lengths):
            first = 0 if leftpad is None else leftpad[batch]
            where = [index[first:] for index in rows_of(case, cache, batch, max(length, 0))]
            values = torch.randn(len(where[0]), num_heads_kv, dim, **place)
            cache[where[0], where[1]] = values
        case[name] = cache
    if seqlen_new > 0:
        case["k"] = torch.randn(batch_size, seqlen_new, num_heads_kv, head_dim, **place)
        case["v"] = torch.randn(batch_size, seqlen_new, num_heads_kv, head_dim_v, **place)
    return case


def rows_of(case, cache, batch, length) -> tuple:
    return reference.cache_rows(
        batch, length, cache.shape[1], case.get("block_table"), case.get("cache_batch_idx")
    )


def rotary_tables(place, rows, rotary_dim, dtype=None) -> dict:
    angle = torch.rand(rows, rotary_dim // 2, device=place["device"]) * 2 * math.pi
    dtype = place["dtype"] if dtype is None else dtype
    return {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}


def converted(case, dtype) -> dict:
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in case.items()
    }


def run_ours(kernel, case, **options) -> tuple:
    """Results of a call on copies of the caches, and these copies."""
    caches = {name: case[name].clone() for name in ("k_cache", "v_cache")}
    with poisoned_memory():
        out, softmax_lse = kernel.flash_attn_with_kvcache(
            **{**case, **caches}, return_softmax_lse=True, **options
        )
    return out, softmax_lse, caches["k_cache"], caches["v_cache"]


def check(kernel, case, ours_options=None, **options) -> torch.Tensor:
    """Asserts that results and cache are the reference's; gives out. ``options`` go to both,
    ``ours_options`` (num_splits, say) to ours alone."""
    out, softmax_lse, *caches = run_ours(kernel, case, **options, **(ours_options or {}))
    expected = reference.attention_kvcache(**converted(case, torch.float64), **options)
    if case["q"].dtype == torch.float32:
        reduced = case["k_cache"].shape[1] * 2 + case["q"].shape[-1]
        if "block_table" in case:
            reduced = case["k_cache"].shape[0] * case["k_cache"].shape[1] + case["q"].shape[-1]
        allowed = float32_tolerance(expected[0], reduced)
        allowed_lse = LSE_TOLERANCE
        rotation = float32_tolerance(expected[2].nan_to_num(), 2)
    else:
        in_torch = reference.attention_kvcache(**case, **options)
        allowed = tolerance(expected[0], in_torch[0])
        rotation = tolerance(expected[2].nan_to_num(), in_torch[2].nan_to_num())
        # Rotated rows are rounded before they are multiplied.
        rotated = tolerance(expected[1], in_torch[1]) if "rotary_cos" in case else 0
        allowed_lse = max(LSE_TOLERANCE, rotated)
    assert out.dtype == case["q"].dtype
    assert out.is_contiguous()
    assert softmax_lse.dtype == torch.float32
    assert_within("out", out, expected[0], allowed)
    assert_within("softmax_lse", softmax_lse, expected[1], allowed_lse)
    check_caches(case, caches, expected[2:], rotation if "rotary_cos" in case else 0)
    return out


def bits(tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_caches(case, caches, expected, rotation) -> None:
    """The new rows are there, ``rotation`` off at most in k; every other bit is as it was."""
    for name, ours, reference_cache in zip(("k", "v"), caches, expected, strict=True):
        untouched = torch.ones(ours.shape[:2], dtype=torch.bool, device=ours.device)
        if "k" in case:
            for batch, length in enumerate(case["cache_seqlens"].tolist()):
                if length < 0:
                    continue
                where = rows_of(case, ours, batch, length + case["k"].shape[1])
                new = [index[length:] for index in where]
                untouched[new[0], new[1]] = False
                values, wanted = ours[new[0], new[1]], reference_cache[new[0], new[1]]
                assert_within(f"{name}_cache", values, wanted, rotation if name == "k" else 0)
        before = case[f"{name}_cache"]
        assert_same_bits(f"{name}_cache", bits(ours[untouched]), bits(before[untouched]))
