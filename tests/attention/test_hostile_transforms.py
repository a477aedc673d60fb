"""Appends that torch's own machinery would lose or tell of in its own words; calls with more
sequences than any loop could visit."""

import gc

import pytest
import torch
from errors import assert_same_bits, assert_zero

from .kvcache_comparison import bits, make_case, rotary_tables
from .test_refusals import refused

CPU = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
MANY = 2**40


@pytest.fixture
def case():
    case = make_case(CPU, [30, 9], 2, 3, heads=(4, 2), head_dim=16)
    return case | {name: case[name].nan_to_num_() for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("view", [torch._neg_view, lambda x: x.to(torch.complex64).conj()])
def test_caches_that_are_views_of_other_numbers(kernel, case, compiled, name, view):
    """Torch would write new rows into a copy."""

    def call(case):
        return kernel.flash_attn_with_kvcache(**case)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call({**case, name: view(case[name])})
    assert f"{name} is a view of the" in str(caught.value)
    assert f"pass {name}.clone()" in str(caught.value)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_inputs_that_are_views_of_negatives(kernel, case, compiled):
    def call(case):
        return kernel.flash_attn_with_kvcache(**case)

    names = ("q", "k", "v", "k_cache", "v_cache")
    copy = {name: value.clone() for name, value in case.items()}
    expected = call({**copy, **{name: -case[name] for name in names[:3]}})
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    out = call({**case, **{name: torch._neg_view(case[name]) for name in names[:3]}})
    assert_same_bits("out", bits(out), bits(expected))
    for name in names[3:]:
        assert_same_bits(name, bits(case[name]), bits(copy[name]))


def test_an_append_under_vmap_and_functionalize(kernel, case):
    def call(q, k, v):
        caches = case["k_cache"], case["v_cache"]
        return kernel.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=3)

    new = [case[name] for name in ("q", "k", "v")]
    before = case["k_cache"].clone()
    said = "flash_attn_with_kvcache writes k and v into its caches, which torch.func."
    with pytest.raises(NotImplementedError, match=f"{said}vmap.*batch_size"):
        torch.func.vmap(call)(*(torch.stack([x, x]) for x in new))
    with pytest.raises(NotImplementedError, match=f"{said}functionalize.*torch.compile"):
        torch.func.functionalize(call)(*new)
    assert_same_bits("k_cache", bits(case["k_cache"]), bits(before))


class TestManySequencesWithoutRows:
    """Nothing is to be done, and nothing is done for each."""

    def test_attention(self, kernel):
        tensors = [torch.empty(MANY, 0, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
        s_aux = torch.zeros(4, requires_grad=True)
        bias = torch.zeros(1, 4, 1, 0, requires_grad=True)
        out = kernel.flash_attn_func(*tensors, s_aux=s_aux, attn_bias=bias)
        out.sum().backward()
        assert out.shape == (MANY, 0, 4, 16)
        assert tensors[1].grad.shape == (MANY, 0, 2, 16)
        assert_zero("ds_aux", s_aux.grad)
        rows = torch.empty(0, MANY, 2, 16)
        assert kernel.flash_attn_func(rows, rows, rows).shape == rows.shape

    @pytest.mark.parametrize("append", ["read", "append", "rotate"])
    def test_with_a_cache(self, kernel, append):
        pages = [torch.zeros(4, 8, 2, 16) for _ in range(2)]
        table = torch.zeros(1, 1, dtype=torch.int32).expand(MANY, 1)
        options = {"cache_seqlens": 8, "block_table": table}
        if append != "read":
            options |= {name: torch.empty(MANY, 0, 2, 16) for name in ("k", "v")}
        if append == "rotate":
            options |= rotary_tables({**CPU, "dtype": torch.float32}, 16, 8)
        q = torch.empty(MANY, 0, 4, 16)
        assert kernel.flash_attn_with_kvcache(q, *pages, **options).shape == q.shape
        table = torch.full((1, 1), 7, dtype=torch.int32).expand(MANY, 1)
        options["block_table"] = table
        refused(
            lambda: kernel.flash_attn_with_kvcache(q, *pages, **options),
            "block_table[0, 0] is 7, but the cache has 4 pages",
        )


MEGABYTE = 2**20


def allow_memory(room):
    """Lets torch have ``room`` megabytes more from the device, besides those that it holds."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + room * MEGABYTE
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))


def occupy_held_memory() -> list:
    """Tensors in the room that torch holds beside what lives in the same segments since earlier
    tests: empty_cache() cannot give it back, and calls would take it before they ask the device."""
    gc.collect()
    allow_memory(0)
    size = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    tensors = []
    try:
        while size > MEGABYTE:
            try:
                tensors.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return tensors


@pytest.mark.gpu
@pytest.mark.parametrize("rotates", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("head_dim", [64, 60], ids=["misaligned q", "padded rows"])
def test_no_append_without_memory_for_what_follows(kernel, rotates, head_dim):
    """q, whose rows no kernel can load, is copied, and so is an output of padded rows: room for
    the copies is found before the append, or nothing is appended."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    occupied = occupy_held_memory()
    case = make_case(place, [9], 1, 3, heads=(8, 2), head_dim=head_dim)
    rows = 2**17
    memory = torch.zeros(rows * 8 * head_dim + 1, **place)
    q = memory[1:].view(1, rows, 8, head_dim)
    tables = rotary_tables(place, 2 * rows, 32) if rotates else {}
    caches = [case["k_cache"], case["v_cache"]]
    new = [case["k"], case["v"]]
    copies = q.nbytes // MEGABYTE
    refusals = 0
    for room in range(copies // 2, 6 * copies, copies // 2):
        before = [cache.clone() for cache in caches]
        allow_memory(room)
        try:
            kernel.flash_attn_with_kvcache(q, *caches, *new, **tables, cache_seqlens=9)
        except torch.OutOfMemoryError:
            refusals += 1
            for cache, old in zip(caches, before, strict=True):
                assert_same_bits("cache", bits(cache), bits(old))
            continue
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        break
    else:
        pytest.fail("no call had room enough")
    assert refusals > 0
    del occupied  # until here
    assert_same_bits("k", bits(caches[0][:, 9:12] if not rotates else new[0]), bits(new[0]))
