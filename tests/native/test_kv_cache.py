"""Where the rows of a key-value cache lie, and attention to them with each instruction set."""

import itertools

import pytest
import reference
import torch
from attention.kvcache_comparison import converted, lengths_tensor, make_case
from errors import LSE_TOLERANCE, assert_within, float32_tolerance, tolerance

from .test_cpu_engines import NAN, place, problem_fields  # noqa: F401

EXTREMES = [-(2**31), -7, -1, 0, 3, 10, 11, 12, 13, 2**31 - 1]
CPU = {"device": torch.device("cpu")}


def layout(**tensors) -> dict:
    """Fields of KvCacheLayout; the tensors must outlive it."""
    return {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for name, value in tensors.items()
    }


def test_no_index_leads_outside(native):
    for values in itertools.product(EXTREMES, EXTREMES, EXTREMES):
        length, leftpad, index = (lengths_tensor([value], CPU) for value in values)
        for seqlen in (0, 5):
            rows = layout(
                num_entries=3,
                entry_rows=12,
                cache_seqlens=length,
                cache_leftpad=leftpad,
                cache_batch_idx=index,
                seqlen=seqlen,
            )
            begin, end = native.kv_positions(rows, 0)
            assert 0 <= begin <= end <= 12, values
            assert end == begin or 0 <= values[2] < 3, values


def test_no_page_leads_outside(native):
    table = lengths_tensor([[0, value] for value in EXTREMES], CPU)
    pages = layout(
        num_entries=3,
        entry_rows=4,
        is_paged=True,
        page_table=table,
        page_table_stride=2,
        pages_per_sequence=2,
    )
    for batch in range(len(EXTREMES)):
        for position in range(8):
            entry, row = native.kv_row(pages, batch, position)
            assert 0 <= entry < 3
            assert row == position % 4


def test_lengths(native):
    lengths = lengths_tensor([4, 0, -1], CPU)
    rows = layout(num_entries=3, entry_rows=12, cache_seqlens=lengths, seqlen=3)
    assert [native.kv_length(rows, batch) for batch in range(3)] == [7, 3, -1]
    bounds = lengths_tensor([0, 4, 4, 3], CPU)
    rows = layout(num_entries=3, entry_rows=12, cu_seqlens_k=bounds)
    assert [native.kv_length(rows, batch) for batch in range(3)] == [4, 0, -1]
    assert native.kv_length(layout(num_entries=3, entry_rows=12, seqlen=9), 2) == 9


def test_no_pages_at_all(native):
    """A table without elements has no address, and still no row of the cache is a sequence's."""
    for page_rows in (0, 4):
        pages = layout(num_entries=3, entry_rows=page_rows, is_paged=True, seqlen=2)
        assert native.kv_positions(pages, 0) == (0, 0)


@pytest.mark.parametrize(("threads", "num_splits"), [(1, 0), (3, 0), (3, 5)])
@pytest.mark.parametrize("page_size", [None, 7])
@pytest.mark.parametrize("dims", [(576, 512), (43, 75)], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)], ids=["tiles", "few rows"])
def test_engines(native, place, heads, dims, page_size, num_splits, threads):  # noqa: F811
    case = make_case(place, [700, 3, 0, 64], 2, 0, heads, *dims, page_size=page_size)
    case["alibi_slopes"], case["s_aux"] = torch.rand(heads[0]), torch.randn(heads[0])
    options = {"causal": True, "window_size": (500, -1)}
    out = torch.full((*case["q"].shape[:3], dims[1]), NAN, dtype=place["dtype"])
    lse = torch.full((4, heads[0], 2), NAN)
    inputs = {"q": case["q"], "k": case["k_cache"], "v": case["v_cache"]}
    fields = problem_fields({**case, **inputs}, options)
    fields["batch_size"], fields["total_q"] = 4, 8
    cache = {"num_entries": inputs["k"].shape[0], "entry_rows": inputs["k"].shape[1]}
    cache["cache_seqlens"] = case["cache_seqlens"]
    if page_size is not None:
        table = case["block_table"]
        cache |= {"is_paged": True, "page_table": table, "page_table_stride": table.stride(0)}
        cache["pages_per_sequence"] = table.shape[1]
    fields |= layout(**cache, out=out, softmax_lse=lse, num_splits=num_splits)
    assert native.attention_kvcache(fields, threads), "wrote behind its workspace"

    expected = reference.attention_kvcache(**converted(case, torch.float64), **options)
    if place["dtype"] == torch.float32:
        allowed = float32_tolerance(expected[0], 700 + dims[0])
    else:
        allowed = tolerance(expected[0], reference.attention_kvcache(**case, **options)[0])
    assert_within("out", out, expected[0], allowed)
    assert_within("softmax_lse", lse, expected[1], LSE_TOLERANCE)
