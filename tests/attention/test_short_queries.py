"""Calls with few query rows for each sequence, as every step of generation makes them. On a GPU
they go to the kernels of the key-value cache, which must give all that the others give, so that
the backward pass may follow."""

import pytest
import torch
from errors import assert_same_bits

from .comparison import check, make_inputs, make_packed, random_dlse, run_ours

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 1000), (4, 129), (16, 700), (9, 5)], ids=str)
def test_matches_the_reference(kernel, place, seqlens, heads, causal):
    check(kernel, make_inputs(place, 2, *seqlens, heads), causal=causal)


@pytest.mark.parametrize("head_dims", [(40, 40), (96, 96), (72, 130), (192, 128), (256, 256)])
def test_head_dims(kernel, bf16_place, head_dims):
    check(kernel, make_inputs(bf16_place, 2, 2, 300, (4, 2), *head_dims), causal=True)


def test_largest_head_dim(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 3, 200, (2, 1), 512)
    check(kernel, inputs, causal=True)
    check(kernel, {**inputs, "v": inputs["k"].clone()})


@pytest.mark.parametrize("window_size", [(0, 0), (40, 3), (1000, -1)], ids=str)
def test_all_terms_together(kernel, place, window_size):
    inputs = make_inputs(place, 3, 5, 300, (6, 2), 64)
    inputs["alibi_slopes"] = torch.rand(3, 6, device=place["device"])
    inputs["s_aux"] = torch.randn(6, **place)
    check(
        kernel,
        inputs,
        dsoftmax_lse=random_dlse(inputs),
        window_size=window_size,
        softcap=20.0,
        softmax_scale=-0.2,
    )


def test_bias_and_dropout_are_not_lost(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 1, 200, (4, 2))
    inputs["attn_bias"] = torch.randn(2, 1, 1, 200, **bf16_place)
    check(kernel, inputs)
    del inputs["attn_bias"]
    none_dropped = run_ours(kernel, inputs)["out"]
    assert not torch.equal(none_dropped, run_ours(kernel, inputs, dropout_p=0.5)["out"])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "lengths",
    [
        ([1] * 7, [300, 1, 64, 0, 129, 1000, 16]),
        ([2, 0, 5, 1], [40, 7, 3, 500]),
        ([1, 1, 30], [10, 2000, 30]),  # a prompt among steps
    ],
    ids=str,
)
def test_packed(kernel, place, lengths, causal):
    inputs = make_packed(place, *lengths, heads=(8, 2), more_rows=3)
    inputs["s_aux"] = torch.randn(8, **place)
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(8, 2), (2, 2), (20, 1)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        ([600, *[1] * 40, 0, 3], [600, *[9] * 40, 7, 300]),  # the mean is a step's
        ([*[1] * 30, 700, 16, 17, 65, 4, 5], [*[5] * 30, 700, 16, 0, 65, 4, 400]),
        ([1, 130, 0, 2, 16], [3000, 130, 10, 2000, 0]),  # the mean is a prompt's
    ],
    ids=["prompt among steps", "all lengths", "steps among prompts"],
)
def test_packed_batches_of_both_kinds(kernel, bf16_place, lengths, heads, causal):
    inputs = make_packed(bf16_place, *lengths, heads=heads, more_rows=3)
    inputs["s_aux"] = torch.randn(heads[0], **bf16_place)
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=causal)


def test_neighbours_in_a_packed_tensor_may_be_anything(kernel, bf16_place):
    inputs = make_packed(bf16_place, [1, 2, 1], [100, 33, 64], heads=(8, 2), more_rows=9)
    clean = run_ours(kernel, inputs, causal=True)["out"]
    for name in ("k", "v"):
        inputs[name][133:] = float("nan")
    dirty = run_ours(kernel, inputs, causal=True)["out"]
    assert torch.equal(clean[:3], dirty[:3])


def test_views_without_a_copy(kernel, bf16_place):
    """A cache that is longer than its keys, heads before rows, as generation with it hands them."""
    cache = torch.full((2, 2, 2, 500, 64), float("nan"), **bf16_place)
    inputs = make_inputs(bf16_place, 2, 1, 300, (8, 2))
    expected = run_ours(kernel, inputs)["out"]
    for i, name in enumerate(("k", "v")):
        cache[i, :, :, :300] = inputs[name].transpose(1, 2)
        inputs[name] = cache[i, :, :, :300].transpose(1, 2)
    assert_same_bits("out", run_ours(kernel, inputs)["out"], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 40])
def test_replays_of_a_graph(kernel, batch_size):
    inputs = make_inputs(CUDA_BF16, batch_size, 1, 5000, (8, 2), 128)

    def call():
        with torch.no_grad():
            return kernel.flash_attn_func(**inputs, causal=True, return_softmax_lse=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(2):
        for tensor in inputs.values():
            tensor.normal_()
        graph.replay()
        for name, ours, eager in zip(("out", "lse"), captured, call(), strict=True):
            assert_same_bits(name, ours, eager)


@pytest.mark.gpu
def test_longer_sequences_than_the_mean_of_a_packed_batch(kernel):
    """The number of splits is chosen by the mean."""
    lengths = [1] * 60 + [20000]
    inputs = make_packed(CUDA_BF16, [1] * 61, lengths, heads=(4, 1), head_dim=128)
    check(kernel, inputs, causal=True)
