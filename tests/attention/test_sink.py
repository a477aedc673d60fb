"""s_aux, the attention sink: one more logit of each row, without a value."""

import pytest
import torch
from errors import assert_same_bits, assert_zero, largest_difference

from .comparison import check, make_inputs, make_packed, random_dlse, random_dout, run_ours


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (4, 4)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_matches_the_reference(kernel, place, heads, causal):
    inputs = make_inputs(place, 2, 65, 130, heads)
    inputs["s_aux"] = torch.randn(heads[0], **place) * 3
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtype_of_the_sink_is_its_own(kernel, bf16_place, dtype):
    inputs = make_inputs(bf16_place, 1, 65, 65, (8, 2))
    inputs["s_aux"] = torch.randn(8, device=bf16_place["device"], dtype=dtype)
    ours = check(kernel, inputs, causal=True)
    assert ours["ds_aux"].dtype == dtype


def test_packed(kernel, place):
    inputs = make_packed(place, [20, 0, 65], [30, 5, 0], (8, 2), more_rows=3)
    inputs["s_aux"] = torch.randn(8, **place)
    check(kernel, inputs, dsoftmax_lse=random_dlse(inputs), causal=True)


def test_is_in_natural_units_and_not_scaled(kernel, place):
    inputs = make_inputs(place, 1, 9, 5)
    inputs["q"].zero_()
    inputs["s_aux"] = torch.tensor([-2.0, 0.0, 1.0, 3.0], **place)
    lse = run_ours(kernel, inputs, softmax_scale=10.0)["softmax_lse"]
    expected = torch.log(5 + inputs["s_aux"].double().exp())[None, :, None].expand(1, 4, 9)
    assert largest_difference(lse, expected) < 1e-5


def test_gradient_is_minus_the_sum_of_its_weight_times_delta(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 65, 65, (8, 2))
    inputs["s_aux"] = torch.randn(8, device=bf16_place["device"])
    dout = random_dout(inputs)
    ours = run_ours(kernel, inputs, dout, causal=True)
    weight = (inputs["s_aux"][None, :, None] - ours["softmax_lse"]).double().exp()
    delta = (ours["out"].double() * dout.double()).sum(-1).transpose(1, 2)
    expected = -(weight * delta).sum(dim=(0, 2))
    # out is rounded to bfloat16 in both; what differs is the order of a float32 sum
    assert largest_difference(ours["ds_aux"], expected) < 1e-4 * expected.abs().max().item()


def test_rows_that_see_no_key_have_the_sink_alone(kernel, place):
    inputs = make_inputs(place, 1, 9, 5)
    inputs["s_aux"] = torch.randn(4, **place)
    ours = check(kernel, inputs, causal=True)
    assert_zero("out", ours["out"][:, :4])
    expected = inputs["s_aux"].float()[None, :, None].expand(1, 4, 4)
    assert largest_difference(ours["softmax_lse"][:, :, :4], expected) < 1e-6


def test_a_sink_of_minus_infinity_is_none(kernel, place):
    inputs = make_inputs(place, 1, 9, 5)
    plain = run_ours(kernel, inputs, causal=True)
    inputs["s_aux"] = torch.full((4,), -torch.inf, **place)
    ours = run_ours(kernel, inputs, causal=True)
    for name in plain:
        assert largest_difference(ours[name], plain[name]) < 1e-6, name
    assert_zero("ds_aux", ours["ds_aux"])


def test_none_is_no_sink(kernel, bf16_place):
    inputs = make_packed(bf16_place, [20, 30])
    with_none = run_ours(kernel, {**inputs, "s_aux": None})
    assert_same_bits("out", with_none["out"], run_ours(kernel, inputs)["out"])
