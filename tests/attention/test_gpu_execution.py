"""What only a GPU can get wrong: streams, graphs, host syncs, offsets past 2^31, workspace."""

import concurrent.futures

import pytest
import torch
from errors import assert_same_bits

from .comparison import (
    check,
    make_inputs,
    make_packed,
    random_dout,
    run_ours,
    with_gradients,
)

pytestmark = pytest.mark.gpu

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
GRADIENTS = ("q", "k", "v")


def packed_call(kernel, leaves, dout):
    """Output and gradients of a packed call whose lengths are on the device only."""
    out = kernel.flash_attn_varlen_func(
        **leaves, max_seqlen_q=256, max_seqlen_k=256, causal=True, deterministic=True
    )
    return (out, *torch.autograd.grad(out, [leaves[n] for n in GRADIENTS], dout))


def test_both_passes_in_a_graph_with_other_lengths(kernel):
    inputs = make_packed(CUDA_BF16, [128, 128], heads=(8, 2))
    inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"].clone()
    leaves, dout = with_gradients(inputs), random_dout(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        packed_call(kernel, leaves, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = packed_call(kernel, leaves, dout)
    # The last split leaves 100 rows that no sequence covers.
    for lengths in ([128, 128], [1, 255], [256, 0], [0, 3], [100, 56]):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
            leaves[name].copy_(ends)
        graph.replay()
        expected = packed_call(kernel, leaves, dout)
        for name, ours, eager in zip(("out", "dq", "dk", "dv"), captured, expected, strict=True):
            assert_same_bits(name, ours, eager)


def test_work_is_ordered_on_the_current_stream(kernel):
    inputs = make_inputs(CUDA_BF16, 1, 300, 300)
    dout = random_dout(inputs)
    expected = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    late = {name: torch.full_like(tensor, float("nan")) for name, tensor in inputs.items()}
    late_dout = torch.full_like(dout, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the values arrive long after the calls are queued
        for name, tensor in inputs.items():
            late[name].copy_(tensor)
        late_dout.copy_(dout)
        leaves = with_gradients(late)
        out = kernel.flash_attn_func(**leaves, causal=True, deterministic=True)
        grads = torch.autograd.grad(out, [leaves[n] for n in GRADIENTS], late_dout)
    stream.synchronize()
    for name, ours in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert_same_bits(name, ours, expected[name])


def test_no_call_waits_for_the_device(kernel):
    inputs = make_packed(CUDA_BF16, [5, 0, 200, 33], heads=(4, 1))
    leaves, dout = with_gradients(inputs), random_dout(inputs)
    packed_call(kernel, leaves, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_call(kernel, leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rows", [300, 1], ids=["many rows", "decoding"])
def test_a_thread_whose_first_work_it_is(kernel, rows):
    """It has no context yet where torch has memory for the results without asking for more."""
    inputs = make_inputs(CUDA_BF16, 2, rows, 700, (8, 2))
    expected = kernel.flash_attn_func(**inputs, return_softmax_lse=True)
    kernel.flash_attn_func(**inputs, return_softmax_lse=True)  # its memory is free for the thread
    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        call = pool.submit(kernel.flash_attn_func, **inputs, return_softmax_lse=True)
        ours = call.result()
    for name, one, other in zip(("out", "softmax_lse"), ours, expected, strict=True):
        assert_same_bits(name, one, other)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_calls_that_follow_each_other(kernel, packed):
    """Each takes what the one before writes, although it starts before that one's end."""
    lengths = [300, 40, 333]
    inputs = make_packed(CUDA_BF16, lengths, heads=(4, 4), head_dim=128)
    inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"].clone()

    def call(q, i):
        if packed:
            return kernel.flash_attn_varlen_func(
                **{**inputs, "q": q}, max_seqlen_q=333, max_seqlen_k=333, causal=i % 2 == 0
            )
        k, v = inputs["k"][None], inputs["v"][None]
        return kernel.flash_attn_func(q[None], k, v, causal=i % 2 == 0)[0]

    steps = [inputs["q"]]
    for i in range(6):
        steps.append(call(steps[-1], i))
        torch.cuda.synchronize()
    for _ in range(20):
        chain = [inputs["q"]]
        for i in range(6):
            chain.append(call(chain[-1], i))
        for i in range(1, 7):
            assert_same_bits(f"call {i}", chain[i], steps[i])


@pytest.mark.parametrize("name", GRADIENTS)
def test_strides_past_two_to_the_31_elements(kernel, name):
    inputs = make_inputs(CUDA_BF16, 2, 70, 70, (2, 2))
    dout = random_dout(inputs)
    expected = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    shape, batch_stride = inputs[name].shape, 2**31 + 64
    far = torch.empty(batch_stride + shape[1:].numel(), **CUDA_BF16).as_strided(
        shape, (batch_stride, *inputs[name].stride()[1:])
    )
    far.copy_(inputs[name])
    ours = run_ours(kernel, {**inputs, name: far}, dout, causal=True, deterministic=True)
    for result in expected:
        assert_same_bits(result, ours[result], expected[result])


@pytest.mark.parametrize("heads", [(8, 1), (12, 2), (7, 7)], ids=str)
def test_grids_too_small_for_the_card(kernel, heads):
    """The query heads of a group are then shared by several CTAs."""
    inputs = make_inputs(CUDA_BF16, 1, 130, 70, heads)
    check(kernel, inputs, causal=True)
    check(kernel, inputs, causal=True, ours_options={"deterministic": True})


def test_backward_workspace_does_not_expand_keys_to_query_heads(kernel):
    inputs = make_inputs(CUDA_BF16, 2, 2048, 2048, (16, 2), 128)
    leaves, dout = with_gradients(inputs), random_dout(inputs)
    out = kernel.flash_attn_func(**leaves, causal=True, deterministic=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, [leaves[n] for n in GRADIENTS], dout)
    peak = torch.cuda.max_memory_allocated() - before
    results = sum(g.nbytes for g in grads)
    dq_sums = 4 * inputs["q"].numel()
    rows = 2 * 4 * out.shape[0] * out.shape[1] * out.shape[2]  # LSE and delta in float32
    expanded = 2 * inputs["q"].nbytes  # dK and dV with a head per query head
    assert peak < results + dq_sums + rows + expanded / 4
