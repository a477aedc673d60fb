"""Attention to a key-value cache under torch.compile, in CUDA graphs and on streams."""

import pytest
import torch
from errors import assert_same_bits
from torch._dynamo.testing import CompileCounterWithBackend

from .comparison import make_packed
from .kvcache_comparison import (
    bits,
    lengths_tensor,
    make_case,
    random_pages,
    rotary_tables,
    run_ours,
)

SCALARS = (0.2, True, 9, -1, 0.0)  # softmax_scale, causal, window_left, window_right, softcap


def ops_of(kernel):
    return kernel._ops.ops


@pytest.mark.parametrize("page_size", [None, 16])
def test_opcheck_of_reading(kernel, bf16_place, page_size):
    case = make_case(bf16_place, [20, 7], 3, page_size=page_size)
    tensors = [case[name] for name in ("q", "k_cache", "v_cache")]
    tensors += [None, None, case["cache_seqlens"], None, None, case.get("block_table")]
    terms = [torch.rand(4, device=bf16_place["device"]) for _ in range(2)]
    arguments = (*tensors, *terms, 0, *SCALARS, 2, False)
    torch.library.opcheck(ops_of(kernel).attention_kvcache.default, arguments)


def test_opcheck_of_packed_reading(kernel, bf16_place):
    inputs = make_packed(bf16_place, [5, 0, 9], [20, 3, 7], (4, 2), 12, 20, more_rows=2)
    table = random_pages([20, 3, 7], 8, bf16_place)
    pages = [torch.randn(9, 8, 2, dim, **bf16_place) for dim in (12, 20)]
    lengths = [inputs["cu_seqlens_q"], inputs["cu_seqlens_k"]]
    tensors = (inputs["q"], *pages, *lengths, None, None, None, table, None, None)
    arguments = (*tensors, 0, *SCALARS, 0, False)
    torch.library.opcheck(ops_of(kernel).attention_kvcache.default, arguments)


@pytest.mark.parametrize("page_size", [None, 16])
def test_opcheck_of_appending(kernel, bf16_place, page_size):
    case = make_case(bf16_place, [20, 7], 3, 2, page_size=page_size)
    case |= rotary_tables(bf16_place, 30, 16)
    names = ("k_cache", "v_cache", "q", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens")
    # Clones of the caches are compared, by values that must be equal to themselves.
    caches = [case[name].nan_to_num() for name in names[:2]]
    tensors = [*caches, *(case[name] for name in names[2:])]
    tensors += [None, None, case.get("block_table"), None, None]
    arguments = (*tensors, 0, *SCALARS, True, 0, False)
    torch.library.opcheck(ops_of(kernel).attention_kvcache_append.default, arguments)


def compiled(call, **options):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, **options)


def same(ours, expected):
    for name, a, b in zip(("out", "lse", "k_cache", "v_cache"), ours, expected, strict=True):
        assert_same_bits(name, bits(a), bits(b))


def step(kernel, case):
    """One call as a model makes it; the caches are its state."""
    return kernel.flash_attn_with_kvcache(**case, causal=True, return_softmax_lse=True)


@pytest.mark.parametrize("new", [0, 2], ids=["read", "append"])
@pytest.mark.parametrize("page_size", [None, 16])
def test_compiles_whole(kernel, bf16_place, page_size, new):
    case = make_case(bf16_place, [20, 7], 2, new, page_size=page_size)
    if new:
        case |= rotary_tables(bf16_place, 30, 32)
    expected = run_ours(kernel, case, causal=True)
    call = compiled(lambda case: step(kernel, case))
    with torch.no_grad():
        ours = call(case)
    same((*ours, case["k_cache"], case["v_cache"]), expected)


def test_compiled_packed_queries(kernel, bf16_place):
    inputs = make_packed(bf16_place, [5, 0, 9], [20, 3, 7])
    inputs["block_table"] = random_pages([20, 3, 7], 8, bf16_place)
    for name in ("k", "v"):
        inputs[name] = torch.randn(9, 8, 2, 64, **bf16_place)

    def call(inputs):
        return kernel.flash_attn_varlen_func(**inputs, max_seqlen_q=9, max_seqlen_k=20, causal=True)

    assert_same_bits("out", compiled(call)(inputs), call(inputs))


def test_a_growing_int_compiles_no_more_than_twice(kernel, bf16_place):
    case = make_case(bf16_place, [40, 40], 1, 1)
    del case["cache_seqlens"]
    counter = CompileCounterWithBackend("aot_eager")

    def call(case, length):
        return kernel.flash_attn_with_kvcache(**case, cache_seqlens=length, causal=True)

    ours = {name: value.clone() for name, value in case.items()}
    decode = compiled(call, backend=counter)
    for length in range(20, 28):
        assert_same_bits("out", decode(ours, length), call(case, length))
    assert_same_bits("k_cache", bits(ours["k_cache"]), bits(case["k_cache"]))
    assert counter.frame_count <= 2


def test_inference_mode(kernel, bf16_place):
    with torch.inference_mode():
        case = make_case(bf16_place, [20, 7], 2, 2)
        expected = run_ours(kernel, case, causal=True)
        same((*step(kernel, case), case["k_cache"], case["v_cache"]), expected)


def fill(static, case):
    for name, value in case.items():
        static[name].copy_(value)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("page_size", [None, 16, 256])
def test_a_graph_replays_at_other_lengths(kernel, page_size, seqlen_q):
    """Captured at the longest lengths; caches, lengths and page tables change between replays."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    longest = [2000, 2000, 2000]
    make = {"seqlen_q": seqlen_q, "seqlen_new": 2, "heads": (8, 2), "page_size": page_size}
    static = make_case(place, longest, **make)
    static |= rotary_tables(place, 2002, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(kernel, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(kernel, static)
    for lengths in ([2000, 2000, 2000], [1, 0, 1999], [700, -1, 64], [0, 0, 0]):
        case = make_case(place, longest, **make)
        case["cache_seqlens"] = lengths_tensor(lengths, place)
        fill(static, case)
        graph.replay()
        tables = {name: static[name] for name in ("rotary_cos", "rotary_sin")}
        expected = run_ours(kernel, case | tables, causal=True)
        same((*captured, static["k_cache"], static["v_cache"]), expected)


@pytest.mark.gpu
def test_a_packed_graph_replays_at_other_lengths(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_packed(place, [40, 24], [300, 200], more_rows=8)
    inputs["block_table"] = random_pages([512, 512], 16, place)
    for name in ("k", "v"):
        inputs[name] = torch.randn(70, 16, 2, 64, **place)

    def call():
        return kernel.flash_attn_varlen_func(
            **inputs, max_seqlen_q=64, max_seqlen_k=512, causal=True
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for rows, keys in (((1, 1), (512, 3)), ((0, 72), (10, 512)), ((64, 0), (0, 0))):
        for name, (first, second) in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
            inputs[name].copy_(torch.tensor([0, first, first + second], dtype=torch.int32))
        graph.replay()
        assert_same_bits("out", captured, call())


@pytest.mark.gpu
def test_no_host_sync(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [200, 70], 1, 1, page_size=16) | rotary_tables(place, 300, 64)
    step(kernel, case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(kernel, case)
        step(kernel, {**case, "cache_seqlens": 20})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_work_is_ordered_on_the_current_stream(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [2000, 700], 1, 1, page_size=16)
    expected = run_ours(kernel, case, causal=True)
    late = {name: torch.zeros_like(value) for name, value in case.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        fill(late, case)
        ours = step(kernel, late)
    stream.synchronize()
    same((*ours, late["k_cache"], late["v_cache"]), expected)


@pytest.mark.gpu
def test_checks_are_refused_in_a_capture(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    case = make_case(place, [20, 7], 1, 1)
    step(kernel, case)
    kernel.check_inputs(True)
    try:
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match=r"check_inputs\(False\)"), capture:
            step(kernel, case)
    finally:
        kernel.check_inputs(False)
