"""Attention to a key-value cache against the reference; unused rows and pages hold NaN."""

import math

import pytest
import reference
import torch
from errors import assert_same_bits, assert_within, assert_zero

from . import comparison
from .comparison import cumulative, make_inputs, make_packed
from .kvcache_comparison import (
    FAR_OUTSIDE,
    bits,
    check,
    lengths_tensor,
    make_case,
    random_pages,
    rotary_tables,
    run_ours,
)

PAGE_SIZES = [None, 1, 3, 16, 64, 256]


def head_terms(place, case, batch_slopes=False) -> dict:
    batch_size, _, num_heads_q, _ = case["q"].shape
    shape = (batch_size, num_heads_q) if batch_slopes else (num_heads_q,)
    return {
        "alibi_slopes": torch.rand(shape, device=place["device"]),
        "s_aux": torch.randn(num_heads_q, device=place["device"]),
    }


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 16, 70])
def test_matches_the_reference(kernel, place, seqlen_q, page_size):
    case = make_case(place, [300, 1, 129, 64], seqlen_q, heads=(8, 2), page_size=page_size)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 1000, 4096])
def test_lengths(kernel, bf16_place, length, causal, page_size):
    lengths = [length, length - 1]
    case = make_case(bf16_place, lengths, 3, heads=(4, 2), head_dim=128, page_size=page_size)
    check(kernel, case, causal=causal)


@pytest.mark.parametrize("seqlen_q", [1, 9])
@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (6, 2), (8, 2), (7, 1), (16, 2), (32, 1), (150, 1)], ids=str
)
def test_groups(kernel, bf16_place, heads, seqlen_q):
    case = make_case(bf16_place, [200, 77], seqlen_q, seqlen_q, heads, 32)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    "dims",
    [
        (64, 64),
        (96, 96),
        (128, 128),
        (192, 128),
        (256, 256),
        (512, 512),
        (576, 512),
        (40, 72),
        (46, 46),
        (1, 1),
        (8, 200),
    ],
    ids=str,
)
def test_head_dims(kernel, place, dims, page_size):
    """Also with rows of odd pitch: a row that is written ends where the next one begins."""
    case = make_case(place, [70, 0, 130], 2, 2, (4, 2), *dims, page_size=page_size)
    check(kernel, case, causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"window_size": (20, 0)},
        {"window_size": (7, -1)},
        {"window_size": (-1, 3)},
        {"window_size": (31, 31), "causal": True},
        {"window_size": (0, 0)},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [None, 16])
def test_options(kernel, bf16_place, options, page_size):
    case = make_case(bf16_place, [300, 5, 65], 4, heads=(4, 2), page_size=page_size)
    check(kernel, case, **options)


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("seqlen_q", [1, 17])
def test_all_terms_together(kernel, place, seqlen_q, page_size):
    case = make_case(place, [300, 40, 0], seqlen_q, 2, (6, 2), 40, 72, page_size)
    case |= head_terms(place, case, batch_slopes=True)
    check(kernel, case, causal=True, window_size=(60, -1), softcap=20.0)


def test_more_queries_than_keys(kernel, place):
    case = make_case(place, [3, 0, 20], 40) | {"s_aux": torch.randn(4, **place)}
    out = check(kernel, case, causal=True)
    assert_zero("out", out[1])
    del case["s_aux"]
    lse = run_ours(kernel, case, causal=True)[1]
    assert torch.isneginf(lse[1]).all()
    assert torch.isneginf(lse[0, :, :37]).all()


@pytest.mark.parametrize("page_size", [None, 5])
def test_left_padding(kernel, place, page_size):
    case = make_case(place, [40, 9, 33], 3, 2, leftpad=[7, 0, 33], page_size=page_size)
    case |= head_terms(place, case)
    check(kernel, case, causal=True, window_size=(25, 0))


def test_rows_of_a_larger_cache(kernel, place):
    case = make_case(place, [40, 9, 33], 2, 2, shuffled=True, leftpad=[3, 0, 1])
    check(kernel, case, causal=True)


@pytest.mark.parametrize("seqlen_new", [1, 2, 40])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_append(kernel, place, page_size, seqlen_new):
    case = make_case(place, [0, 50, 63, 128], 2, seqlen_new, page_size=page_size)
    check(kernel, case, causal=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary_dim", [2, 32, 64])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_rotary(kernel, place, rotary_dim, interleaved, causal):
    case = make_case(place, [0, 50, 63], 3, 5, page_size=16)
    case |= rotary_tables(place, 70, rotary_dim)
    check(kernel, case, causal=causal, rotary_interleaved=interleaved)


def test_rotary_tables_in_float32_and_a_window(kernel, place):
    case = make_case(place, [0, 50, 63], 3, 1, heads=(6, 2), head_dim=46)
    case |= rotary_tables(place, 66, 46, torch.float32)
    check(kernel, case, window_size=(30, -1))


def test_rotary_tables_that_are_views(kernel, bf16_place):
    case = make_case(bf16_place, [20, 3], 1, 1)
    tables = rotary_tables(bf16_place, 40, 64)
    case |= {name: table[:, ::2] for name, table in tables.items()}
    check(kernel, case, rotary_interleaved=False)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
def test_splits(kernel, place, num_splits):
    case = make_case(place, [1000, 3, 0, 513], 2, heads=(4, 2), page_size=64)
    case |= head_terms(place, case)
    check(kernel, case, {"num_splits": num_splits}, causal=True)


def test_one_int_for_all_lengths(kernel, place):
    case = make_case(place, [50, 50], 2, 3)
    expected = run_ours(kernel, case, causal=True)
    for length in (50, torch.tensor(50)):
        ours = run_ours(kernel, {**case, "cache_seqlens": length}, causal=True)
        for name, a, b in zip(("out", "lse", "k", "v"), ours, expected, strict=True):
            assert_same_bits(name, bits(a), bits(b))


def test_no_lengths_are_full_caches(kernel, place):
    inputs = make_inputs(place, 2, 3, 40)
    out = kernel.flash_attn_with_kvcache(inputs["q"], inputs["k"], inputs["v"], causal=True)
    ours = kernel.flash_attn_with_kvcache(
        inputs["q"], inputs["k"], inputs["v"], cache_seqlens=40, causal=True
    )
    assert_same_bits("out", out, ours)
    case = {"q": inputs["q"], "k_cache": inputs["k"], "v_cache": inputs["v"]}
    check(kernel, {**case, "cache_seqlens": lengths_tensor([40, 40], place)}, causal=True)


def test_both_names_of_the_table(kernel, bf16_place):
    case = make_case(bf16_place, [50, 20], page_size=16)
    expected = run_ours(kernel, case)[0]
    table = case.pop("block_table")
    assert_same_bits("out", run_ours(kernel, {**case, "page_table": table})[0], expected)
    wide = torch.full((2, 9), FAR_OUTSIDE, dtype=torch.int32, device=table.device)
    wide[:, : table.shape[1]] = table
    view = wide[:, : table.shape[1]]
    assert_same_bits("out", run_ours(kernel, {**case, "block_table": view})[0], expected)


@pytest.mark.parametrize("page_size", [None, 16])
def test_rows_of_padding(kernel, place, page_size):
    """A negative length: as Transformers' continuous batching fills its batches up."""
    case = make_case(place, [30, -1, 5, -7], 2, 2, page_size=page_size)
    case["s_aux"] = torch.randn(4, **place)
    out = check(kernel, case, causal=True)
    assert_zero("out", out[1])
    assert_zero("out", out[3])
    del case["s_aux"]
    out, lse, *_ = run_ours(kernel, case, causal=True)
    assert torch.isneginf(lse[1::2]).all()


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0)], ids=["no sequences", "no queries"])
def test_nothing_to_attend_from(kernel, bf16_place, sizes):
    batch_size, seqlen_q = sizes
    case = make_case(bf16_place, [5] * batch_size, seqlen_q, 2)
    out, lse, *_ = run_ours(kernel, case, causal=True)
    assert out.shape == case["q"].shape
    assert lse.shape == (batch_size, 4, seqlen_q)
    check(kernel, case) if batch_size else None


def strided_copy(tensor) -> torch.Tensor:
    """The same values as a view of heads-first memory with NaN around it."""
    memory = tensor.new_full((tensor.shape[0], tensor.shape[2] + 1, *tensor.shape[1::2]), math.nan)
    view = memory[:, :-1].transpose(1, 2)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("page_size", [None, 16])
def test_strides(kernel, bf16_place, page_size):
    case = make_case(bf16_place, [30, 70], 3, 2, heads=(4, 2), head_dim=32, page_size=page_size)
    expected = run_ours(kernel, case, causal=True)[0]
    strided = {
        name: strided_copy(value) if name in ("q", "k", "v", "k_cache", "v_cache") else value
        for name, value in case.items()
    }
    out = kernel.flash_attn_with_kvcache(**strided, causal=True)
    assert_same_bits("out", out, expected)


def test_keys_and_values_of_one_tensor(kernel, bf16_place):
    """Latent attention: values are the first 512 columns of the keys."""
    case = make_case(bf16_place, [40, 90], 1, heads=(16, 1), head_dim=576, head_dim_v=512)
    case["v_cache"] = case["k_cache"][..., :512]
    out, *_ = run_ours(kernel, case)
    expected = reference.attention_kvcache(
        **{n: x.double() if x.is_floating_point() else x for n, x in case.items()}
    )[0]
    in_torch = reference.attention_kvcache(**case)[0]
    assert_within("out", out, expected, 2 * (in_torch.double() - expected).abs().max() + 1e-5)
    out = kernel.flash_attn_with_kvcache(**case)
    assert_within("out", out, expected, 2 * (in_torch.double() - expected).abs().max() + 1e-5)


FLAGS = [
    {},
    {"window_size": (9, 0)},
    {"softcap": 8.0},
    {"alibi_slopes": True},
    {"s_aux": True},
    {"window_size": (12, 12), "softcap": 8.0, "alibi_slopes": True, "s_aux": True},
]


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def test_a_decode_step_is_a_row_of_the_whole_pass(kernel, place, flags, page_size):
    steps, prompt = 30, 6
    inputs = make_inputs(place, 2, steps, steps, (4, 2), 64)
    options = dict(flags, causal=True)
    terms = head_terms(place, inputs)
    options |= {name: terms[name] for name in terms if name in flags}
    whole, lse = kernel.flash_attn_func(**inputs, **options, return_softmax_lse=True)

    cache = {"k_cache": torch.full((2, steps, 2, 64), math.nan, **place)}
    if page_size is not None:
        cache["k_cache"] = torch.full((16, page_size, 2, 64), math.nan, **place)
        cache["block_table"] = random_pages([steps, steps], page_size, place)
    cache["v_cache"] = cache["k_cache"].clone()
    unit = torch.finfo(place["dtype"]).eps * max(1, whole.abs().max().item())
    for begin in [0, *range(prompt, steps)]:
        rows = slice(begin, prompt if begin == 0 else begin + 1)
        step = {name: inputs[name][:, rows] for name in ("q", "k", "v")}
        out, step_lse = kernel.flash_attn_with_kvcache(
            **step, **cache, cache_seqlens=begin, return_softmax_lse=True, **options
        )
        # Two roundings, since sums run in another order
        assert_within("out", out, whole[:, rows], 4 * unit)
        assert_within("softmax_lse", step_lse, lse[..., rows], 1e-4)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_queries_with_a_table(kernel, place, page_size, causal):
    lengths_q, lengths_k = [3, 0, 130, 1], [70, 8, 200, 0]
    inputs = make_packed(place, lengths_q, lengths_k, (6, 2), 40, 72, more_rows=5)
    terms = {"s_aux": torch.randn(6, **place), "softcap": 9.0, "causal": causal}
    terms["alibi_slopes"] = torch.rand(4, 6, device=place["device"])
    expected = kernel.flash_attn_varlen_func(
        **inputs, max_seqlen_q=130, max_seqlen_k=200, **terms, return_softmax_lse=True
    )
    table = random_pages(lengths_k, page_size, place)
    bounds = inputs["cu_seqlens_k"].tolist()
    for name in ("k", "v"):
        pages = torch.full((300, page_size, *inputs[name].shape[1:]), math.nan, **place)
        for batch, length in enumerate(lengths_k):
            where = reference.cache_rows(batch, length, page_size, table)
            pages[where[0], where[1]] = inputs[name][bounds[batch] : bounds[batch] + length]
        inputs[name] = pages
    ours = kernel.flash_attn_varlen_func(
        **inputs,
        max_seqlen_q=130,
        max_seqlen_k=200,
        block_table=table,
        **terms,
        return_softmax_lse=True,
    )
    unit = torch.finfo(place["dtype"]).eps * max(1, expected[0].abs().max().item())
    assert_within("out", ours[0], expected[0], 4 * unit)
    assert_within("softmax_lse", ours[1], expected[1], 1e-4)
    assert_zero("out", ours[0][134:])


def test_packed_decode_with_a_table(kernel, bf16_place):
    """One query row for each sequence, and more rows than sequences."""
    case = make_case(bf16_place, [70, 3, 200], page_size=16)
    expected = run_ours(kernel, case, causal=True)[0]
    q = torch.cat([case["q"][:, 0], torch.randn(2, 4, 64, **bf16_place)])
    out = kernel.flash_attn_varlen_func(
        q,
        case["k_cache"],
        case["v_cache"],
        cumulative([1, 1, 1], bf16_place["device"]),
        cumulative([70, 3, 200], bf16_place["device"]),
        1,
        200,
        causal=True,
        block_table=case["block_table"],
    )
    unit = torch.finfo(torch.bfloat16).eps * max(1, expected.abs().max().item())
    assert_within("out", out[:3], expected[:, 0], 4 * unit)
    assert_zero("out", out[3:])


@pytest.mark.gpu
def test_wrong_values_on_a_gpu_lead_nowhere_outside(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [30, 70], 2, 2, page_size=16)
    for lengths in ([10**9, -(10**9)], [2**31 - 1, 80]):
        for table in (FAR_OUTSIDE, -5, 0):
            wrong = {**case, "cache_seqlens": lengths_tensor(lengths, place)}
            wrong["block_table"] = torch.full_like(case["block_table"], table)
            run_ours(kernel, wrong, causal=True)
    case = make_case(place, [30, 70], 2, 2, shuffled=True, leftpad=[3, 4])
    for wrong in ("cache_batch_idx", "cache_leftpad", "cache_seqlens"):
        for values in ([10**9, -5], [-(10**9), 2**31 - 1]):
            run_ours(kernel, {**case, wrong: lengths_tensor(values, place)}, causal=True)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_rows_that_do_not_fit_are_left_out_on_a_gpu(kernel, page_size):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [60, 10], 1, 4, page_size=page_size)
    capacity = case["k_cache"].shape[1]
    if page_size is not None:
        case["block_table"] = case["block_table"][:, :4].contiguous()
        capacity = 64
    begin = capacity - 2
    where = reference.cache_rows(0, capacity, case["k_cache"].shape[1], case.get("block_table"))
    for name in ("k_cache", "v_cache"):
        case[name][where[0], where[1]] = torch.randn(capacity, 2, 64, **place)
    case["cache_seqlens"] = lengths_tensor([begin, 10], place)
    out, _, k_cache, _ = run_ours(kernel, case, causal=True)
    assert not out.isnan().any()
    new = [index[begin:] for index in where]
    assert_same_bits("k_cache", k_cache[new[0], new[1]], case["k"][0, :2])
    other = torch.ones(k_cache.shape[:2], dtype=torch.bool, device="cuda")
    other[new[0], new[1]] = False
    second = reference.cache_rows(1, 14, k_cache.shape[1], case.get("block_table"))
    other[second[0][10:], second[1][10:]] = False
    assert_same_bits("k_cache", bits(k_cache[other]), bits(case["k_cache"][other]))


def test_same_as_attention_without_a_cache(kernel, place):
    inputs = make_inputs(place, 2, 7, 90)
    expected = comparison.run_ours(kernel, inputs, causal=True)["out"]
    out = kernel.flash_attn_with_kvcache(inputs["q"], inputs["k"], inputs["v"], causal=True)
    unit = torch.finfo(place["dtype"]).eps * max(1, expected.abs().max().item())
    assert_within("out", out, expected, 4 * unit)
