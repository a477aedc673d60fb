"""attn_bias: an addend to every score, and its gradient in its own shape and dtype."""

import itertools
import math

import pytest
import torch
from errors import assert_same_bits, assert_zero, surrounded_by_nan

from .comparison import check, make_inputs, make_packed, random_dout, run_ours


def dense_bias(place, shape, **inputs_options):
    inputs = make_inputs(place, **inputs_options)
    batch_size, seqlen_q, num_heads_q, _ = inputs["q"].shape
    full = (batch_size, num_heads_q, seqlen_q, inputs["k"].shape[1])
    shape = [full[dim] if wanted == "all" else 1 for dim, wanted in enumerate(shape)] + [full[3]]
    inputs["attn_bias"] = torch.randn(shape, **place)
    return inputs


BROADCASTS = list(itertools.product(["all", 1], repeat=3))


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_dense_shapes(kernel, bf16_place, shape):
    inputs = dense_bias(bf16_place, shape, seqlen_q=65, seqlen_k=129, heads=(6, 2))
    check(kernel, inputs, causal=True)


@pytest.mark.parametrize("shape", [("all", "all", "all"), (1, "all", "all"), (1, 1, 1)], ids=str)
def test_each_dtype(kernel, place, shape):
    check(kernel, dense_bias(place, shape, seqlen_q=40, seqlen_k=70))


def test_float32_bias_of_low_precision_inputs(kernel, bf16_place):
    inputs = dense_bias(bf16_place, (1, "all", "all"), seqlen_q=65, seqlen_k=70)
    inputs["attn_bias"] = inputs["attn_bias"].float()
    check(kernel, inputs)


@pytest.mark.parametrize("heads_of_bias", [1, 6])
@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "one row"])
def test_packed_shapes(kernel, bf16_place, heads_of_bias, one_row):
    inputs = make_packed(bf16_place, [20, 0, 65], [30, 8, 64], (6, 2), more_rows=4)
    rows = 1 if one_row else inputs["q"].shape[0]
    inputs["attn_bias"] = torch.randn(heads_of_bias, rows, 64, **bf16_place)
    check(kernel, inputs, causal=True)


def test_columns_beyond_a_sequence_are_not_read_and_have_no_gradient(kernel, bf16_place):
    inputs = make_packed(bf16_place, [20, 33], [30, 64], (4, 2))
    bias = torch.randn(4, 53, 80, **bf16_place)
    bias[:, :20, 30:] = math.nan
    bias[:, 20:, 64:] = math.nan
    inputs["attn_bias"] = bias
    ours = run_ours(kernel, inputs)
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name
    assert_zero("dattn_bias", ours["dattn_bias"][:, :20, 30:])
    assert_zero("dattn_bias", ours["dattn_bias"][:, 20:, 64:])


def test_minus_infinity_hides_a_key(kernel, place):
    inputs = dense_bias(place, ("all", 1, "all"), seqlen_q=65, seqlen_k=70)
    hidden = torch.rand(inputs["attn_bias"].shape, device=place["device"]) < 0.5
    hidden[:, :, 3] = True  # a row that sees nothing
    inputs["attn_bias"][hidden] = -math.inf
    ours = check(kernel, inputs)
    assert_zero("out", ours["out"][:, 3])
    assert torch.isneginf(ours["softmax_lse"][:, :, 3]).all()
    assert_zero("dattn_bias", ours["dattn_bias"][hidden])


def test_minus_infinity_everywhere_with_a_sink(kernel, place):
    inputs = dense_bias(place, (1, 1, 1), seqlen_q=9, seqlen_k=70)
    inputs["attn_bias"][:] = -math.inf
    inputs["s_aux"] = torch.randn(4, **place)
    ours = check(kernel, inputs)
    assert_zero("out", ours["out"])


@pytest.mark.parametrize(
    "layout",
    [
        surrounded_by_nan,
        lambda bias: bias.transpose(2, 3).contiguous().transpose(2, 3),
        lambda bias: bias.transpose(0, 2).contiguous().transpose(0, 2),
    ],
    ids=["gaps", "columns first", "rows first"],
)
def test_strides(kernel, bf16_place, layout):
    inputs = dense_bias(bf16_place, ("all", "all", "all"), seqlen_q=33, seqlen_k=70)
    dout = random_dout(inputs)
    plain = run_ours(kernel, inputs, dout, deterministic=True)
    strided = {**inputs, "attn_bias": layout(inputs["attn_bias"])}
    ours = run_ours(kernel, strided, dout, deterministic=True)
    for name in plain:
        assert_same_bits(name, ours[name], plain[name])


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [8, 2, 1])
def test_rows_that_begin_at_any_multiple_of_their_entries(
    kernel, bf16_place, offset, dtype, head_dim
):
    inputs = dense_bias(bf16_place, (1, "all", "all"), seqlen_q=70, seqlen_k=128, head_dim=head_dim)
    inputs["attn_bias"] = inputs["attn_bias"].to(dtype)
    dout = random_dout(inputs)
    plain = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    memory = torch.nn.functional.pad(inputs["attn_bias"], (offset, 0), value=math.nan)
    moved = {**inputs, "attn_bias": memory[..., offset:]}
    ours = run_ours(kernel, moved, dout, causal=True, deterministic=True)
    for name in plain:
        assert_same_bits(name, ours[name], plain[name])


def test_an_expanded_bias_is_a_full_one(kernel, bf16_place):
    inputs = dense_bias(bf16_place, (1, 1, "all"), seqlen_q=33, seqlen_k=70)
    expanded = inputs["attn_bias"].expand(2, 4, 33, 70)
    ours = run_ours(kernel, {**inputs, "attn_bias": expanded}, deterministic=True)
    full = run_ours(kernel, {**inputs, "attn_bias": expanded.contiguous()}, deterministic=True)
    for name in full:
        assert_same_bits(name, ours[name], full[name])


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, "all", 1), ("all", 1, "all")], ids=str)
def test_broadcast_gradient_repeats_bit_for_bit_when_deterministic(kernel, bf16_place, shape):
    inputs = dense_bias(bf16_place, shape, seqlen_q=129, seqlen_k=130, heads=(6, 2))
    dout = random_dout(inputs)
    first = run_ours(kernel, inputs, dout, deterministic=True)
    for _ in range(5):
        again = run_ours(kernel, inputs, dout, deterministic=True)
        assert_same_bits("dattn_bias", again["dattn_bias"], first["dattn_bias"])


def test_bias_without_gradient_gets_none(kernel, bf16_place):
    inputs = dense_bias(bf16_place, (1, 1, "all"), seqlen_q=33, seqlen_k=70)
    q = inputs["q"].requires_grad_()
    kernel.flash_attn_func(**{**inputs, "q": q}).sum().backward()
    assert inputs["attn_bias"].grad is None
    assert q.grad is not None


def test_bias_is_added_after_scale_and_softcap(kernel, bf16_place):
    # With q zero the score is the bias alone, which no scale and no cap may change.
    inputs = dense_bias(bf16_place, (1, 1, "all"), seqlen_q=20, seqlen_k=30)
    inputs["q"].zero_()
    lse = run_ours(kernel, inputs, softmax_scale=3.0, softcap=0.5)["softmax_lse"]
    expected = torch.logsumexp(inputs["attn_bias"].double(), -1).expand(2, 4, 20)
    assert (lse.double() - expected).abs().max() < 1e-5
