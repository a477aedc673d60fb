"""What users of other libraries reported about key-value caches, as tests."""

import math

import pytest
import torch
from errors import assert_same_bits, assert_within

from .comparison import make_inputs
from .kvcache_comparison import check, lengths_tensor, make_case, run_ours
from .test_kvcache_refusals import refused_whole


@pytest.mark.parametrize("head_dim", [46, 48, 64])
def test_cache_rows_of_odd_pitch(kernel, bf16_place, head_dim):
    """vllm-project/vllm#45466: a row of 46 elements begins at no multiple of 16 bytes."""
    case = make_case(bf16_place, [0, 3], 1, 40, (4, 2), head_dim, page_size=16)
    _, _, *caches = run_ours(kernel, case, causal=True)
    for name, cache in zip(("k", "v"), caches, strict=True):
        for batch, first in enumerate([0, 3]):
            positions = torch.arange(first, first + 40, device=cache.device)
            pages = case["block_table"][batch][positions // 16].long()
            assert_same_bits(name, cache[pages, positions % 16], case[name][batch])
    check(kernel, case, causal=True)


@pytest.mark.parametrize(("length", "new"), [(600, 0), (510, 8)])
def test_lengths_behind_the_page_table(kernel, bf16_place, length, new):
    """Dao-AILab/flash-attention#2711: 2 pages of 256."""
    shape = (2, 256, 2, 64)
    case = {
        "q": torch.randn(1, 1, 4, 64, **bf16_place),
        "k_cache": torch.randn(shape, **bf16_place),
        "v_cache": torch.randn(shape, **bf16_place),
        "block_table": lengths_tensor([[1, 0]], bf16_place),
    }
    if new:
        case |= {name: torch.randn(1, new, 2, 64, **bf16_place) for name in ("k", "v")}
    room = "the page table has room for 512 (2 pages of 256)"
    refused_whole(kernel, case, room, str(length), cache_seqlens=length)
    lengths = lengths_tensor([length], bf16_place)
    if bf16_place["device"].type == "cpu":
        refused_whole(kernel, case, room, f"[0] is {length}", cache_seqlens=lengths)
        return
    # The host does not read them there: rows that do not fit are left out.
    out, lse, k_cache, _ = run_ours(kernel, {**case, "cache_seqlens": lengths}, causal=True)
    assert math.isfinite(out.float().sum().item() + lse.sum().item())
    kept = k_cache.flatten(0, 1)[: 254 if new else 256]  # the second page
    assert_same_bits("k_cache", kept, case["k_cache"].flatten(0, 1)[: len(kept)])


def test_sequences_of_a_cache_two_to_the_30_elements_apart(kernel, bf16_place):
    """Dao-AILab/flash-attention#772: rows were written into another sequence's part of the cache.
    Keys and values of all layers alternate in one buffer, of which little is ever touched."""
    shape, strides = (5, 12, 2, 64), (2**30, 32 * 2 * 2 * 64, 64, 1)
    buffer = torch.empty(4 * strides[0] + shape[1] * strides[1], **bf16_place)
    wide = {
        name: buffer.as_strided(shape, strides, offset)
        for name, offset in (("k_cache", 0), ("v_cache", 2 * 64))
    }
    narrow = {name: torch.randn(shape, **bf16_place) for name in wide}
    for name, cache in wide.items():
        cache.copy_(narrow[name])
    new = {name: torch.randn(4, 3, heads, 64, **bf16_place) for name, heads in (("q", 4), ("k", 2))}
    new["v"] = torch.randn_like(new["k"])
    options = {
        "cache_seqlens": lengths_tensor([5, 0, 3, 9], bf16_place),
        "cache_batch_idx": lengths_tensor([4, 1, 3, 2], bf16_place),
        "causal": True,
    }
    untouched = {name: cache[0].clone() for name, cache in narrow.items()}
    out, expected = (kernel.flash_attn_with_kvcache(**new, **c, **options) for c in (wide, narrow))
    assert_same_bits("out", out, expected)
    for name in wide:
        assert_same_bits(name, wide[name], narrow[name])
        assert_same_bits(name, wide[name][0], untouched[name])


@pytest.mark.parametrize("shape", [(8,), (2, 8)], ids=str)
def test_alibi_of_a_decoded_token_is_that_of_the_training_pass(kernel, bf16_place, shape):
    """Dao-AILab/flash-attention#907: a prompt of 9 tokens, then token by token."""
    prompt, total = 9, 14
    inputs = make_inputs(bf16_place, 2, total, total, (8, 8))
    slopes = torch.rand(shape, device=bf16_place["device"])
    whole = kernel.flash_attn_func(**inputs, causal=True, alibi_slopes=slopes)
    caches = {}
    for name in ("k", "v"):
        caches[f"{name}_cache"] = torch.full((2, 32, 8, 64), math.nan, **bf16_place)
        caches[f"{name}_cache"][:, :prompt] = inputs[name][:, :prompt]
    allowed = 2 * torch.finfo(torch.bfloat16).eps * whole.abs().max().item()
    for step in range(prompt, total):
        new = {name: inputs[name][:, step : step + 1] for name in ("q", "k", "v")}
        lengths = lengths_tensor([step, step], bf16_place)
        out = kernel.flash_attn_with_kvcache(
            **new, **caches, cache_seqlens=lengths, causal=True, alibi_slopes=slopes
        )
        assert_within("out", out[:, 0], whole[:, step], allowed)
