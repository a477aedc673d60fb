"""Dropout: a mask that is a function of the random state and the position alone, the same in both
passes."""

import pytest
import reference
import torch
from errors import assert_same_bits, assert_within, poisoned_memory

from .comparison import (
    allowed_errors,
    gradients,
    make_inputs,
    make_packed,
    random_dout,
    run_formula,
    with_gradients,
)


def drawn_state(place) -> torch.Tensor:
    """The random state that the next call will draw."""
    device = place["device"]
    before = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
    state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    if device.type == "cpu":
        torch.set_rng_state(before)
    else:
        torch.cuda.set_rng_state(before)
    return state


def keep_mask(place, dropout_p, inputs) -> torch.Tensor:
    batch_size, seqlen_q, num_heads_q, _ = inputs["q"].shape
    state = drawn_state(place).tolist()
    seqlen_k = inputs["k"].shape[1]
    masks = [
        reference.dropout_keep(state, dropout_p, batch, num_heads_q, seqlen_q, seqlen_k)
        for batch in range(batch_size)
    ]
    return torch.stack(masks).to(place["device"])


def run(kernel, inputs, dout, **options) -> dict:
    inputs = with_gradients(inputs)
    with poisoned_memory():
        out, lse = kernel.flash_attn_func(**inputs, return_softmax_lse=True, **options)
        return {"out": out, "softmax_lse": lse, **gradients(inputs, out, lse, dout, None)}


def assert_matches(ours, inputs, dout, **options):
    expected = run_formula(inputs, dout, dtype=torch.float64, **options)
    allowed = allowed_errors(inputs, expected, dout=dout, **options)
    for name in expected:
        assert_within(name, ours[name], expected[name], allowed[name])


def test_philox_known_answers():
    # Salmon et al. publish these with their code (kat_vectors, philox4x32-10).
    zeros = [torch.zeros(1, dtype=torch.int64)] * 4
    values = [int(x) for x in reference.philox_4x32_10(zeros, [0, 0])]
    assert values == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [torch.full((1,), 0xFFFFFFFF, dtype=torch.int64)] * 4
    values = [int(x) for x in reference.philox_4x32_10(ones, [0xFFFFFFFF, 0xFFFFFFFF])]
    assert values == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_matches_the_reference_with_the_explicit_mask(kernel, place, heads, dropout_p):
    inputs = make_inputs(place, 2, 65, 130, heads)
    dout = random_dout(inputs)
    keep = keep_mask(place, dropout_p, inputs)
    ours = run(kernel, inputs, dout, dropout_p=dropout_p, causal=True)
    assert_matches(ours, inputs, dout, dropout_p=dropout_p, dropout_keep=keep, causal=True)


def test_all_terms_with_dropout(kernel, place):
    inputs = make_inputs(place, 2, 40, 70, (6, 2), 40, 72)
    inputs["s_aux"] = torch.randn(6, **place)
    inputs["attn_bias"] = torch.randn(2, 1, 40, 70, **place)
    dout = random_dout(inputs)
    keep = keep_mask(place, 0.3, inputs)
    ours = run(kernel, inputs, dout, dropout_p=0.3, softcap=20.0, window_size=(30, 3))
    options = {"dropout_p": 0.3, "softcap": 20.0, "window_size": (30, 3)}
    assert_matches(ours, inputs, dout, dropout_keep=keep, **options)


def test_packed(kernel, place):
    lengths_q, lengths_k = [20, 0, 65], [30, 8, 64]
    inputs = make_packed(place, lengths_q, lengths_k, more_rows=2)
    dout = random_dout(inputs)
    state = drawn_state(place).tolist()
    keep = [
        reference.dropout_keep(state, 0.25, index, 4, *lengths).to(place["device"])
        for index, lengths in enumerate(zip(lengths_q, lengths_k, strict=True))
    ]
    leaves = with_gradients(inputs)
    out, lse = kernel.flash_attn_varlen_func(
        **leaves, max_seqlen_q=65, max_seqlen_k=64, dropout_p=0.25, return_softmax_lse=True
    )
    ours = {"out": out, "softmax_lse": lse, **gradients(leaves, out, lse, dout, None)}
    assert_matches(ours, inputs, dout, dropout_p=0.25, dropout_keep=keep)


def kept(kernel, place, dropout_p, batch_size=2, heads=2, rows=64, keys=512) -> torch.Tensor:
    """The mask itself, read off the output: all scores equal, values the unit vectors."""
    q = torch.zeros(batch_size, rows, heads, 8, **place)
    k = torch.zeros(batch_size, keys, heads, 8, **place)
    v = torch.eye(keys, **place)[None, :, None].expand(batch_size, keys, heads, keys)
    out = kernel.flash_attn_func(q, k, v, dropout_p=dropout_p)
    return out != 0


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.75])
def test_share_of_dropped_entries(kernel, bf16_place, dropout_p):
    mask = kept(kernel, bf16_place, dropout_p).double()
    # Means of independent draws: five standard deviations each
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2)):
        mean = mask.mean(dims)
        count = mask.numel() / mean.numel()
        deviation = (dropout_p * (1 - dropout_p) / count) ** 0.5
        assert (mean - (1 - dropout_p)).abs().max() < 5 * deviation


def test_heads_batches_rows_and_keys_have_masks_of_their_own(kernel, bf16_place):
    mask = kept(kernel, bf16_place, 0.5)
    expected, deviation = 0.5, (0.25 / (64 * 512)) ** 0.5
    for a, b in (
        (mask[0, :, 0], mask[0, :, 1]),
        (mask[0, :, 0], mask[1, :, 0]),
        (mask[0, :-1, 0], mask[0, 1:, 0]),
        (mask[0, :-8, 0], mask[0, 8:, 0]),
        (mask[0, :, 0, :-1], mask[0, :, 0, 1:]),
        (mask[0, :, 0, :-8], mask[0, :, 0, 8:]),
        (mask[0, :, 0, :-16], mask[0, :, 0, 16:]),
    ):
        agreement = (a == b).double().mean().item()
        assert abs(agreement - expected) < 6 * deviation


def test_same_seed_same_mask(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 65, 130)
    dout = random_dout(inputs)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(run(kernel, inputs, dout, dropout_p=0.2, deterministic=True))
    for name in runs[0]:
        assert_same_bits(name, runs[0][name], runs[1][name])
    assert not torch.equal(runs[0]["out"], runs[2]["out"])


def test_each_call_draws_a_mask_of_its_own(kernel, bf16_place):
    assert not torch.equal(kept(kernel, bf16_place, 0.5), kept(kernel, bf16_place, 0.5))


def test_backward_drops_what_forward_dropped(kernel, bf16_place):
    # dV[key] = sum over rows of mask / (1 - p) / keys when all scores are equal and dout is one
    keys = 256
    place = bf16_place
    q = torch.zeros(1, 64, 1, 8, **place)
    k = torch.zeros(1, keys, 1, 8, **place)
    v = torch.eye(keys, **place)[None, :, None].contiguous().requires_grad_()
    out = kernel.flash_attn_func(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    counts = (out != 0).sum(dim=1)[0, 0].double()
    # every element of the row dv[key] is this sum; powers of two, so exact in bfloat16
    assert torch.equal(dv[0, :, 0, 0].double(), counts * 2 / keys)


def test_mask_does_not_depend_on_what_else_is_computed(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 65, 130, (2, 2), 64)
    torch.manual_seed(3)
    out = kernel.flash_attn_func(**inputs, dropout_p=0.5)
    torch.manual_seed(3)
    first_rows = kernel.flash_attn_func(
        inputs["q"][:, :20], inputs["k"], inputs["v"], dropout_p=0.5
    )
    allowed = 2 * torch.finfo(torch.bfloat16).eps * out.abs().max().item()
    assert_within("out", first_rows, out[:, :20], allowed)


def test_without_dropout_no_random_number_is_drawn(kernel, bf16_place):
    before = drawn_state(bf16_place)
    kernel.flash_attn_func(**make_tensors_without_drawing(bf16_place))
    assert torch.equal(drawn_state(bf16_place), before)


def make_tensors_without_drawing(place) -> dict:
    return {name: torch.ones(1, 4, 2, 8, **place) for name in ("q", "k", "v")}


def test_checkpointing_draws_the_same_mask_again(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 65, 65)
    dout = random_dout(inputs)

    def call(q, k, v):
        return kernel.flash_attn_func(q, k, v, dropout_p=0.3, deterministic=True)

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        leaves = with_gradients(inputs)
        values = [leaves[name] for name in ("q", "k", "v")]
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(call, *values, use_reentrant=False)
        else:
            out = call(*values)
        results.append([out, *torch.autograd.grad(out, values, dout)])
    for plain, again in zip(*results, strict=True):
        assert_same_bits("result", again, plain)


@pytest.mark.gpu
def test_a_captured_call_draws_a_fresh_mask_on_each_replay(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_inputs(place, 2, 512, 512, (12, 12))
    kernel.flash_attn_func(**inputs, dropout_p=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.flash_attn_func(**inputs, dropout_p=0.1)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


@pytest.mark.gpu
def test_both_passes_of_a_captured_packed_call_draw_one_fresh_mask(kernel):
    """Dao-AILab/flash-attention#165, as reported: 2 sequences of 2048 tokens, 12 heads."""
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_packed(place, [2048, 2048], heads=(12, 12))
    leaves = with_gradients(inputs)
    dout = torch.randn_like(inputs["q"])

    def step():
        out = kernel.flash_attn_varlen_func(
            **leaves, max_seqlen_q=2048, max_seqlen_k=2048, dropout_p=0.1, causal=True
        )
        return out, *torch.autograd.grad(out, [leaves[name] for name in ("q", "k", "v")], dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([result.double().clone() for result in results])
    for out, _, _, dv in replays:
        # out is linear in v, so these are equal, but for rounding, with one mask for both; with two
        # they lie half of their size apart.
        forward = (out * dout).sum((0, 2))
        backward = (dv * inputs["v"]).sum((0, 2))
        assert (forward - backward).norm() < 0.05 * forward.norm()
    for first, second in zip(*replays, strict=True):
        assert not torch.equal(first, second)
