"""Memory that the tensors of a call with a key-value cache may share; calls that write nothing."""

import math
import random

import pytest
import torch
from errors import assert_same_bits, assert_zero

from .comparison import cumulative
from .kvcache_comparison import bits, check, lengths_tensor, make_case, rotary_tables
from .test_kvcache_refusals import refused_whole
from .test_refusals import refused

INT64_MAX = 2**63 - 1


@pytest.fixture
def case(bf16_place):
    return make_case(bf16_place, [30, 9], 2, 3, heads=(4, 2), head_dim=16)


@pytest.fixture
def paged(bf16_place):
    return make_case(bf16_place, [30, 9], 2, 3, heads=(4, 2), head_dim=16, page_size=8)


def without(case, *names) -> dict:
    return {name: value for name, value in case.items() if name not in names}


def table_of(shape, place) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=place["device"])


class TestTablesWithoutElements:
    """They have no address, and are tables nevertheless: no sequence has a row of the cache."""

    @pytest.mark.parametrize("lengths", [None, 0, [0]], ids=str)
    @pytest.mark.parametrize("pages", [(3, 4), (3, 0), (0, 4)], ids=str)
    def test_no_pages_per_sequence(self, kernel, bf16_place, pages, lengths):
        cache = torch.full((*pages, 2, 16), math.nan, **bf16_place)
        q = torch.randn(1, 2, 4, 16, **bf16_place)
        if isinstance(lengths, list):
            lengths = lengths_tensor(lengths, bf16_place)
        out, lse = kernel.flash_attn_with_kvcache(
            q,
            cache,
            cache,
            cache_seqlens=lengths,
            block_table=table_of((1, 0), bf16_place),
            return_softmax_lse=True,
        )
        assert_zero("out", out)
        assert (lse == -math.inf).all()

    @pytest.mark.parametrize("width", [0, 5])
    def test_no_sequences(self, kernel, bf16_place, width):
        cache = torch.full((3, 4, 2, 16), math.nan, **bf16_place)
        q = torch.randn(0, 2, 4, 16, **bf16_place)
        table = table_of((0, width), bf16_place)
        for lengths in (None, 0, lengths_tensor([], bf16_place)):
            out = kernel.flash_attn_with_kvcache(
                q, cache, cache, cache_seqlens=lengths, block_table=table
            )
            assert out.shape == q.shape

    def test_an_append_has_no_room(self, kernel, paged, bf16_place):
        empty = table_of((2, 0), bf16_place)
        parts = ("cache_seqlens is 0 and k has 3 new rows", "room for 0 (0 pages of 8)")
        refused_whole(kernel, paged, *parts, cache_seqlens=0, block_table=empty)

    def test_packed_queries(self, kernel, bf16_place):
        cache = torch.full((3, 4, 2, 16), math.nan, **bf16_place)
        q = torch.randn(3, 4, 16, **bf16_place)
        out = kernel.flash_attn_varlen_func(
            q,
            cache,
            cache,
            cumulative([3], bf16_place["device"]),
            cumulative([0], bf16_place["device"]),
            3,
            0,
            block_table=table_of((1, 0), bf16_place),
        )
        assert_zero("out", out)


@pytest.mark.gpu
def test_a_table_without_elements_leaves_out_all_new_rows_on_a_gpu(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    paged = make_case(place, [30, 9], 2, 3, page_size=8)
    before = paged["k_cache"].clone()
    out = kernel.flash_attn_with_kvcache(**{**paged, "block_table": table_of((2, 0), place)})
    assert_zero("out", out)
    assert_same_bits("k_cache", bits(paged["k_cache"]), bits(before))


@pytest.mark.parametrize("length", [INT64_MAX, INT64_MAX - 1, INT64_MAX - 3, 2**70, 2**62, 2**31])
def test_a_length_whose_sum_overflows(kernel, case, paged, length, bf16_place):
    said = f"cache_seqlens is {min(length, INT64_MAX)} and k has 3 new rows"
    for each in (case, paged):
        refused_whole(kernel, each, said, cache_seqlens=length)
        tables = rotary_tables(bf16_place, 40, 8)
        refused_whole(kernel, each, said, cache_seqlens=length, **tables)
        refused_whole(
            kernel, each, "cache_seqlens is", cache_seqlens=length, k=None, v=None, causal=True
        )


def test_more_rows_than_can_be_counted(kernel, bf16_place):
    """A cache has as many only in one place of memory."""
    cache = torch.zeros(1, 1, 1, 1, **bf16_place).expand(1, 2**62, 1, 1)
    q = torch.zeros(1, 1, 1, 1, **bf16_place)
    table = table_of((1, 4), bf16_place)
    for options in ({}, {"block_table": table}, {"block_table": table, "cache_seqlens": 5}):
        refused(
            lambda options=options: kernel.flash_attn_with_kvcache(q, cache, cache, **options),
            "k_cache has shape",
            "at most",
        )


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
class TestCachesThatOverlap:
    def overlapping(self, cache) -> list:
        one = cache[:1, :1, :, :]
        batch, heads, dim = cache.stride(0), cache.stride(2), cache.stride(3)
        return [
            one.expand(*cache.shape),
            cache[:1].expand(*cache.shape),
            cache[:, :, :1].expand(*cache.shape),
            cache.as_strided(cache.shape, (batch, heads, heads, dim)),
            cache.as_strided(cache.shape, (8, 2 * heads, heads, dim)),
            cache.as_strided(cache.shape, (batch, 2 * heads, heads // 2, dim)),
        ]

    def test_refused_if_rows_are_appended(self, kernel, case, name):
        for cache in self.overlapping(case[name].clone()):
            refused_whole(kernel, case, f"{name} has shape", "share memory", **{name: cache})

    def test_read(self, kernel, case, name):
        case = without(case, "k", "v")
        for cache in self.overlapping(torch.randn_like(case[name])):
            check(kernel, {**case, name: cache})


def test_a_cache_of_any_order_of_strides(kernel, case):
    """No two elements share memory, and none of these is refused."""
    for order in ((1, 0, 2, 3), (2, 1, 0, 3), (0, 2, 1, 3)):
        for name in ("k_cache", "v_cache"):
            wide = torch.cat([case[name]] * 2, -1)
            case[name] = wide.permute(order).contiguous().permute(order)[..., :16]
        check(kernel, case, causal=True)


class TestKeysAndValuesOfOneTensor:
    """Views that alternate share no element; those that do cannot both be written."""

    @pytest.mark.parametrize("layout", ["rows", "heads", "columns", "entries", "halves"])
    def test_that_alternate(self, kernel, case, layout):
        dim = {"halves": 0, "entries": 1, "rows": 2, "heads": 3, "columns": 3}[layout]
        caches = (case["k_cache"], case["v_cache"])
        both = torch.cat(caches, 3) if layout == "columns" else torch.stack(caches, dim)
        views = (both[..., :16], both[..., 16:]) if layout == "columns" else both.unbind(dim)
        out = kernel.flash_attn_with_kvcache(
            **{**case, "k_cache": views[0], "v_cache": views[1]}, causal=True
        )
        expected = {name: case[name].clone() for name in ("k_cache", "v_cache")}
        wanted = kernel.flash_attn_with_kvcache(**{**case, **expected}, causal=True)
        assert_same_bits("out", out, wanted)
        for name, view in zip(expected, views, strict=True):
            assert_same_bits(name, bits(view), bits(expected[name]))

    def test_other_head_dims(self, kernel, bf16_place):
        case = make_case(bf16_place, [30, 9], 2, 3, (4, 2), 24, 8)
        both = torch.cat([case["k_cache"], case["v_cache"]], 3)
        case |= {"k_cache": both[..., :24], "v_cache": both[..., 24:]}
        before = both.clone()
        kernel.flash_attn_with_kvcache(**case)
        changed = (bits(both) != bits(before)).view(2, -1, 2, 32, 2).any(-1).any(2).any(-1)
        assert changed.sum(1).tolist() == [3, 3]

    def test_that_overlap(self, kernel, case):
        cache = case["k_cache"]
        wide = torch.cat([cache, cache], -1)
        flat = torch.zeros(2 * cache.numel() + 16, dtype=cache.dtype, device=cache.device)
        shape = cache.shape
        for k_cache, v_cache in (
            (cache, cache),
            (wide[..., :16], wide[..., 8:24]),
            (wide[..., 1:17], wide[..., 16:]),
            (flat[: cache.numel()].view(shape), flat[2 : 2 + cache.numel()].view(shape)),
            (flat[: cache.numel()].view(shape), flat[cache.numel() - 1 : -17].view(shape)),
        ):
            refused_whole(
                kernel, case, "k_cache and v_cache share memory", k_cache=k_cache, v_cache=v_cache
            )

    @pytest.mark.parametrize("by", ["block_table", "cache_batch_idx"])
    def test_entries_of_one_memory(self, kernel, bf16_place, by):
        """Any entry may be one of keys or of values, as in Transformers' continuous batching, where
        the values' view begins one page behind that of the keys."""
        case = make_case(bf16_place, [0, 0], 2, 5, (4, 2), 16, page_size=8)
        pages = torch.full((9, 8, 2, 16), math.nan, **bf16_place)
        case |= {"k_cache": pages[:-1], "v_cache": pages[1:]}
        table = lengths_tensor([[0], [4]], bf16_place)
        case.pop("block_table")
        case[by] = table if by == "block_table" else table[:, 0].contiguous()
        out = kernel.flash_attn_with_kvcache(**case, causal=True)
        for batch, page in enumerate([0, 4]):
            assert_same_bits("k", pages[page, :5], case["k"][batch])
            assert_same_bits("v", pages[page + 1, :5], case["v"][batch])
        assert pages[[2, 3, 6, 7, 8]].isnan().all()
        apart = {**case, "k_cache": pages[[0, 4]], "v_cache": pages[[1, 5]]}
        apart[by] = table // 4 if by == "block_table" else table[:, 0] // 4
        assert_same_bits("out", kernel.flash_attn_with_kvcache(**apart, causal=True), out)

    def test_entries_that_overlap(self, kernel, paged):
        cache = paged["k_cache"]
        flat = torch.zeros(2 * cache.numel() + 64, dtype=cache.dtype, device=cache.device)
        near = flat[8 : 8 + cache.numel()].view(cache.shape)
        wider = flat.as_strided(cache.shape, (cache.stride(0) + 32, *cache.stride()[1:]), 32)
        for k_cache, v_cache in ((cache, cache), (flat[: cache.numel()].view(cache.shape), near)):
            refused_whole(
                kernel, paged, "share memory of one entry", k_cache=k_cache, v_cache=v_cache
            )
        refused_whole(
            kernel,
            paged,
            "share memory of one entry",
            k_cache=flat[: cache.numel()].view(cache.shape),
            v_cache=wider,
        )

    def test_latent_attention_reads_values_in_keys(self, kernel, bf16_place):
        case = make_case(bf16_place, [30, 9], 2, 0, (4, 1), 576, 512)
        check(kernel, {**case, "v_cache": case["k_cache"][..., :512]}, causal=True)


def test_random_strides(kernel):
    """Refused exactly when an element's address occurs twice, as counted one by one."""
    generator = random.Random(0)
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    outcomes = set()
    for _ in range(600):
        heads, dim = generator.choice([1, 2]), generator.choice([1, 2, 3])
        shape = (2, generator.choice([2, 3, 4]), heads, dim)
        strides, offset = [], []
        for _ in range(2):
            bounds = [dim * generator.choice([0, 1, 1, 2, 3]) + generator.choice([0, 0, 1])]
            for size in (shape[1], heads):
                bounds.append(bounds[-1] * generator.choice([1, size, size, 2 * size]))
            order = generator.sample(bounds, 3)
            strides.append((*order, 1))
            offset.append(generator.randrange(0, 12))
        if generator.random() < 0.5:
            strides[1] = strides[0]
        where = torch.arange(1000)
        places = [where.as_strided(shape, *each) for each in zip(strides, offset, strict=True)]
        storage = torch.zeros(1000, dtype=torch.bfloat16)
        caches = [storage.as_strided(shape, *each) for each in zip(strides, offset, strict=True)]
        alone = all(each.unique().numel() == each.numel() for each in places)
        apart = alone and torch.cat([each.flatten() for each in places]).unique().numel() == (
            2 * places[0].numel()
        )
        q, new = (torch.zeros(2, 1, heads, dim, **place) for _ in range(2))

        def call(q=q, caches=caches, new=new):
            return kernel.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=0)

        if apart:
            call()
        else:
            refused(call, "share memory")
        outcomes.add((alone, apart))
    assert len(outcomes) == 3


@pytest.mark.parametrize("where", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_inside_a_cache(kernel, case, name, where):
    inside = case[where].flatten()[8:][: case[name].numel()].view(case[name].shape)
    refused_whole(kernel, case, f"{name} shares memory with {where}", **{name: inside})


def test_tables_inside_a_cache(kernel, case, bf16_place):
    storage = case["k_cache"].flatten()
    index = storage[4:8].view(torch.int32)
    for name in ("cache_leftpad", "cache_seqlens", "cache_batch_idx"):
        refused_whole(kernel, case, f"{name} shares memory with k_cache", **{name: index})
    tables = rotary_tables(bf16_place, 40, 8)
    tables["rotary_sin"] = storage[:160].view(40, 4)
    refused_whole(kernel, case, "rotary_sin shares memory with k_cache", **tables)
    slopes = storage[:8].view(torch.float32)
    refused_whole(kernel, case, "alibi_slopes shares memory with k_cache", alibi_slopes=slopes)


def test_inputs_that_share_memory_with_each_other(kernel, case):
    check(kernel, {**case, "v": case["k"]})
    check(kernel, {**case, "k": case["k"][:1].expand(2, -1, -1, -1)})


def test_inputs_between_the_rows_of_a_cache(kernel, case):
    """A tensor that holds both, in columns of its own."""
    wide = torch.cat([case["k_cache"]] * 2, -1)
    k = wide[:, :3, :, 16:]
    k.copy_(case["k"])
    check(kernel, {**case, "k_cache": wide[..., :16], "k": k})


def test_a_bad_page_that_is_written_in_front_of_the_left_padding(kernel, bf16_place):
    """It holds new rows although no key in it is read."""
    if bf16_place["device"].type == "cuda":
        kernel.check_inputs(True)
    try:
        case = make_case(bf16_place, [6, 6], 1, 20, page_size=8)
        case["cache_leftpad"] = lengths_tensor([0, 20], bf16_place)
        case["block_table"][1, 1] = 99
        refused_whole(kernel, case, "block_table[1, 1] is 99")
    finally:
        kernel.check_inputs(False)


def test_a_cache_without_rows_for_indices(kernel, case, bf16_place):
    empty = {name: case[name][:0] for name in ("k_cache", "v_cache")}
    index = lengths_tensor([0, 0], bf16_place)
    refused_whole(
        kernel, case, "no row for any sequence, batch_size = 2", **empty, cache_batch_idx=index
    )


@pytest.mark.parametrize("num_splits", [129, 2**31 - 1])
def test_no_more_splits_than_make_sense(kernel, place, num_splits):
    """Each costs workspace: this many would not fit."""
    case = make_case(place, [5000, 4999], 1, 0, (2, 1), 64)
    check(kernel, case, {"num_splits": num_splits})


@pytest.mark.gpu
def test_sizes_that_no_launch_can_have(kernel):
    """A GPU's limits, which strides of 0 reach in little memory."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [0], 1, 1, (1, 1), 8)
    q = case["q"].expand(1, 2**20, 2**11, 8)
    refused_whole(kernel, case, "query rows times query heads", q=q)
    row = torch.zeros(1, 1, 1, 8, **place)
    long = {name: row.expand(1, 2**30, 1, 8) for name in ("k_cache", "v_cache")}
    refused(
        lambda: kernel.flash_attn_with_kvcache(case["q"], **long), "positions for each sequence"
    )
