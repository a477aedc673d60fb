"""Scores as large as masks and float16 make them: what docs/numerics.md says of their range."""

import math

import pytest
import reference
import torch
from errors import assert_within

from .comparison import allowed_errors, check, make_inputs, random_dout, run_formula, run_ours

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
HUGE_BIASES = [-1e10, 1e10, -3e9, 3e9, -1.7e38, 1.7e38]  # the last: finfo.max / 2
HUGE_ROWS = slice(40, 46)


def biased_inputs(place, seqlen=200, head_dim=64) -> dict:
    """Rows whose bias is huge, one row for each size, among rows of a normal bias."""
    inputs = make_inputs(place, 2, seqlen, seqlen, (4, 2), head_dim)
    bias = torch.randn(2, 4, seqlen, seqlen, device=place["device"])
    bias[:, :, HUGE_ROWS] = torch.tensor(HUGE_BIASES, device=place["device"])[:, None]
    return {**inputs, "attn_bias": bias}


def rounding_error(inputs, terms=2) -> float:
    """Of probabilities and of the output."""
    v = inputs["v"]
    return terms * torch.finfo(v.dtype).eps * v.abs().max().item()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_rows_of_a_huge_bias(kernel, place, head_dim):
    """float32 holds nothing of q . k beside such a bias: all keys weigh the same."""
    inputs = biased_inputs(place, head_dim=head_dim)
    ours = run_ours(kernel, inputs)
    mean = inputs["v"].double().mean(dim=1, keepdim=True).repeat_interleave(2, dim=2)
    expected = mean.expand(-1, len(HUGE_BIASES), -1, -1)
    assert_within("out", ours["out"][:, HUGE_ROWS], expected, rounding_error(inputs))
    lse = torch.tensor(HUGE_BIASES, device=place["device"], dtype=torch.float64)
    found = ours["softmax_lse"][:, :, HUGE_ROWS].double()
    assert ((found / lse - 1).abs() < 1e-6).all()


def test_rows_beside_those_of_a_huge_bias(kernel, place):
    """Those rows are right as ever, with all gradients, if the others' output is not used."""
    inputs = biased_inputs(place)
    dout = random_dout(inputs)
    dout[:, HUGE_ROWS] = 0
    ours = run_ours(kernel, inputs, dout, deterministic=True)
    apart = {**inputs, "attn_bias": inputs["attn_bias"].clone()}
    apart["attn_bias"][:, :, HUGE_ROWS] = 0
    expected = check(kernel, apart, dout, ours_options={"deterministic": True})
    usual = torch.ones(200, dtype=torch.bool)
    usual[HUGE_ROWS] = False
    for name in ("out", "dq"):
        assert torch.equal(ours[name][:, usual], expected[name][:, usual]), name
    for name in ("dk", "dv"):
        assert torch.equal(ours[name], expected[name]), name
    assert torch.equal(ours["dattn_bias"][:, :, usual], expected["dattn_bias"][:, :, usual])


def test_gradients_of_rows_of_a_huge_bias(kernel, place):
    """The LSE is too coarse to tell their probabilities: they count as 0."""
    inputs = biased_inputs(place)
    ours = run_ours(kernel, inputs, random_dout(inputs))
    for name, value in ours.items():
        assert value.isfinite().all(), name
    assert (ours["dq"][:, HUGE_ROWS] == 0).all()
    assert (ours["dattn_bias"][:, :, HUGE_ROWS] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_at_the_end_of_the_range(kernel, place, head_dim, causal):
    """2^25 + 4 n, which float32 holds exactly, with the largest ones in the first keys: the maximum
    grows on the way from the last key to the first, and from the first to the last it stays."""
    if place["dtype"] == torch.bfloat16:
        steps = torch.arange(400).flip(0) // 100 * 4.0
    else:
        steps = torch.randint(0, 4, (400,)) * 4.0
    inputs = make_inputs(place, 1, 400, 400, (2, 1), head_dim)
    inputs["q"].zero_()
    inputs["k"].zero_()
    inputs["q"][..., 0], inputs["k"][..., 0] = 2.0**12, 2.0**13
    inputs["q"][..., 1], inputs["k"][..., 1] = 1, steps[:, None].to(inputs["k"])
    options = {"softmax_scale": 1.0, "causal": causal}
    ours = run_ours(kernel, inputs, **options)
    expected = run_formula(inputs, dtype=torch.float64, **options)
    assert_within("out", ours["out"], expected["out"], rounding_error(inputs))
    assert ((ours["softmax_lse"] / expected["softmax_lse"] - 1).abs() < 1e-6).all()
    for name, value in ours.items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("sign", [-1, 1])
def test_products_beyond_the_range(kernel, place, head_dim, sign):
    """Rows of scores of 2^32 stay finite and leave the others alone; on a CPU they are right."""
    inputs = make_inputs(place, 1, 200, 200, (2, 1), head_dim)
    huge = torch.zeros(200, dtype=torch.bool)
    huge[100:164] = True
    inputs["q"][..., :4] = 0
    inputs["q"][:, huge] = 0
    inputs["q"][:, huge, :, :4] = 2.0**15 * sign
    inputs["k"][..., :4] = 0
    inputs["k"][:, ::3, :, :4] = 2.0**15
    options = {"softmax_scale": 0.5}
    dout = random_dout(inputs) / 64  # dq of the others times 2^15 is a float16, too
    for name, value in run_ours(kernel, inputs, dout, **options).items():
        finite = value.isfinite()
        assert finite.all() if name != "softmax_lse" else finite[:, :, ~huge].all(), name

    dout[:, huge] = 0
    ours = run_ours(kernel, inputs, dout, **options)
    others = {**inputs, "q": inputs["q"][:, ~huge]}
    options["dout"] = dout[:, ~huge]
    expected = run_formula(others, dtype=torch.float64, **options)
    allowed = allowed_errors(others, expected, **options)
    rows = {"out": 1, "dq": 1, "softmax_lse": 2}  # their dimension
    for name, value in expected.items():
        found = ours[name]
        if name in rows:
            found = found.movedim(rows[name], 0)[~huge].movedim(0, rows[name])
        assert_within(name, found, value, allowed[name])
    if place["device"].type == "cpu":
        whole = run_formula(inputs, dtype=torch.float64, softmax_scale=0.5)
        found, wanted = ours["out"][:, huge], whole["out"][:, huge]
        assert_within("out", found, wanted, rounding_error(inputs))


@pytest.mark.parametrize("softcap", [1e-40, 1.2e-38, 1e-30, 1e30, 3e38])
def test_extreme_softcaps(kernel, softcap):
    inputs = make_inputs(CPU, 2, 5, 7, (4, 2), 16)
    out = kernel.flash_attn_func(**inputs, softcap=softcap)
    wide = {key: tensor.double() for key, tensor in inputs.items()}
    expected, _ = reference.attention(**wide, softcap=softcap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_of_the_lowest_number_hides_a_key(kernel, bf16_place, dtype):
    """Masks of padding hold the lowest finite number, whole tiles of keys and whole rows of it."""
    inputs = make_inputs(bf16_place, 2, 300, 300, (4, 2), 64)
    bias = torch.randn(2, 1, 300, 300, device=bf16_place["device"]).to(dtype)
    hidden = torch.zeros_like(bias, dtype=torch.bool)
    hidden[0, :, :, :200] = True
    hidden[:, :, 7] = True
    low = {**inputs, "attn_bias": bias.masked_fill(hidden, torch.finfo(dtype).min)}
    masked = {**inputs, "attn_bias": bias.masked_fill(hidden, -math.inf)}
    ours = run_ours(kernel, low, deterministic=True)
    expected = run_ours(kernel, masked, deterministic=True)
    assert (expected["out"][:, 7] == 0).all()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
