"""softmax_lse: one layout for all, natural units, and differentiable."""

import math

import pytest
import torch
from errors import LSE_TOLERANCE, assert_same_bits, assert_zero, largest_difference

from .comparison import (
    check,
    make_inputs,
    make_packed,
    random_dlse,
    random_dout,
    run_ours,
)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradient_through_lse(kernel, place, heads):
    inputs = make_inputs(place, 2, 65, 130, heads)
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=True)


def test_gradient_through_packed_lse(kernel, place):
    inputs = make_packed(place, [20, 0, 65], [30, 4, 64], more_rows=2)
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=True)


def test_gradient_through_lse_of_rows_that_see_no_key_is_zero(kernel, place):
    inputs = make_inputs(place, 1, 9, 5)
    ours = check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=True)
    assert_zero("dq", ours["dq"][:, :4])


def test_a_loss_on_lse_alone_reaches_q_and_k_and_not_v(kernel, place):
    inputs = make_inputs(place, 1, 16, 16, (2, 1))
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    _, lse = kernel.flash_attn_func(**leaves, return_softmax_lse=True)
    (lse**2).sum().backward()
    dlse = 2 * lse.detach()
    expected = check(kernel, inputs, torch.zeros_like(random_dout(inputs)), dlse)
    assert leaves["q"].grad.any()
    assert leaves["k"].grad.any()
    assert_zero("dv", leaves["v"].grad)
    # Without a gradient of out the op gets none, not one of zeros: the results are the same.
    for name in ("q", "k"):
        difference = largest_difference(leaves[name].grad, expected[f"d{name}"])
        assert difference <= 1e-2 * expected[f"d{name}"].abs().max().item()


def test_an_unused_lse_costs_nothing_and_changes_nothing(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 65, 65)
    dout = random_dout(inputs)
    zeros = torch.zeros(1, 4, 65, device=bf16_place["device"])
    unused = run_ours(kernel, inputs, dout, None, deterministic=True)
    weighted_by_zero = run_ours(kernel, inputs, dout, zeros, deterministic=True)
    for name in unused:
        assert_same_bits(name, weighted_by_zero[name], unused[name])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_layouts(kernel, bf16_place, heads):
    dense = run_ours(kernel, make_inputs(bf16_place, 3, 5, 9, heads))
    assert dense["softmax_lse"].shape == (3, heads[0], 5)
    packed = run_ours(kernel, make_packed(bf16_place, [3, 7], heads=heads))
    assert packed["softmax_lse"].shape == (heads[0], 10)
    one_token = run_ours(kernel, make_packed(bf16_place, [1, 1], heads=heads))
    assert one_token["softmax_lse"].shape == (heads[0], 2)
    for result in (dense, packed, one_token):
        assert result["softmax_lse"].dtype == torch.float32


def test_natural_logarithm(kernel, place):
    inputs = make_inputs(place, 1, 4, 10)
    inputs["q"].zero_()
    lse = run_ours(kernel, inputs)["softmax_lse"]
    assert largest_difference(lse, torch.full_like(lse, math.log(10))) < LSE_TOLERANCE


def test_results_of_each_flag(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 9, 9)
    out = kernel.flash_attn_func(**inputs)
    assert isinstance(out, torch.Tensor)
    pair = kernel.flash_attn_func(**inputs, return_softmax_lse=True)
    assert len(pair) == 2
    triple = kernel.flash_attn_func(**inputs, return_attn_probs=True)
    assert len(triple) == 3
    assert triple[2] is None
    both = kernel.flash_attn_func(**inputs, return_attn_probs=True, return_softmax_lse=True)
    assert len(both) == 3
    for result in (pair, triple, both):
        assert_same_bits("out", result[0], out)
        assert_same_bits("softmax_lse", result[1], pair[1])


def test_two_halves_merge_by_their_lse(kernel, place):
    # What ring attention does: attention over all keys from attention over each half of them.
    inputs = make_inputs(place, 1, 33, 128)
    whole = check(kernel, inputs)
    halves = [
        run_ours(kernel, {**inputs, "k": inputs["k"][:, keys], "v": inputs["v"][:, keys]})
        for keys in (slice(0, 64), slice(64, 128))
    ]
    weights = torch.softmax(torch.stack([half["softmax_lse"] for half in halves]), dim=0)
    merged = sum(
        weight.transpose(1, 2)[..., None] * half["out"].float()
        for weight, half in zip(weights, halves, strict=True)
    )
    # Three roundings to the inputs' dtype of values that are at most the largest of v
    unit = torch.finfo(place["dtype"]).eps
    assert largest_difference(merged, whole["out"]) <= 4 * unit * inputs["v"].abs().max().item()
