"""Views: a row may start anywhere, and rows may lie in any order and distance."""

import pytest
import torch
from errors import assert_same_bits, surrounded_by_nan

from .comparison import check, make_inputs, run_ours

NORMS = ["rms_norm", "layer_norm"]


def same_as_contiguous(kernel, norm, inputs, **options):
    """Views give the bits of contiguous tensors, gradients too."""
    x = inputs["x"]
    dout = torch.randn(x.shape, dtype=x.dtype, device=x.device)
    ours = run_ours(kernel, norm, inputs, dout, **options)
    dense = {name: tensor.contiguous() for name, tensor in inputs.items()}
    expected = run_ours(kernel, norm, dense, dout, **options)
    for name, value in expected.items():
        assert_same_bits(name, ours[name], value)


def views(place, kind):
    """x of head dim 64 or so as a view; the memory around it holds NaN."""
    nan = float("nan")
    if kind == "slice of a fused projection":
        fused = torch.full((3, 7, 3 * 256), nan, **place)
        fused[..., 256:512] = torch.randn(3, 7, 256, **place)
        return fused[..., 256:512]
    if kind == "heads of a fused projection":
        fused = torch.full((3, 7, 3072), nan, **place)
        fused[..., 1024:2048] = torch.randn(3, 7, 1024, **place)
        return fused.split(1024, dim=-1)[1].view(3, 7, 16, 64)
    if kind == "heads before positions":
        return torch.randn(3, 7, 16, 64, **place).transpose(1, 2)
    if kind == "every second row":
        memory = torch.full((20, 64), nan, **place)
        memory[::2] = torch.randn(10, 64, **place)
        return memory[::2]
    if kind == "rows of no alignment":
        memory = torch.full((9, 67), nan, **place)
        memory[:, 1:65] = torch.randn(9, 64, **place)
        return memory[:, 1:65]
    if kind == "base of no alignment":
        return torch.randn(9 * 64 + 1, **place)[1:].view(9, 64)
    if kind == "rows backwards in memory order":
        return torch.randn(4, 5, 6, 64, **place).permute(2, 1, 0, 3)
    if kind == "one row many times":
        return torch.randn(64, **place).expand(3, 5, 64)
    if kind == "last dimension strided":
        return torch.randn(9, 64, 2, **place)[..., 1]
    if kind == "last dimension transposed":
        return torch.randn(64, 9, **place).t()
    if kind == "more scattered dimensions than a kernel takes":
        return torch.randn(2, 2, 2, 2, 3, 2, 8, **place).permute(5, 4, 3, 2, 1, 0, 6)
    assert kind == "surrounded by NaN"
    return surrounded_by_nan(torch.randn(3, 5, 64, **place))


KINDS = [
    "slice of a fused projection",
    "heads of a fused projection",
    "heads before positions",
    "every second row",
    "rows of no alignment",
    "base of no alignment",
    "rows backwards in memory order",
    "one row many times",
    "last dimension strided",
    "last dimension transposed",
    "more scattered dimensions than a kernel takes",
    "surrounded by NaN",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_views_of_x(kernel, place, norm, kind):
    x = views(place, kind)
    check(kernel, norm, {"x": x, "weight": torch.randn(x.shape[-1], **place)})


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_the_residual(kernel, bf16_place, kind):
    residual = views(bf16_place, kind)
    inputs = make_inputs(bf16_place, residual.shape)
    check(kernel, "rms_norm", {**inputs, "residual": residual}, with_dresidual_out=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_views_of_dout(kernel, bf16_place, norm, kind):
    dout = views(bf16_place, kind)
    check(kernel, norm, make_inputs(bf16_place, dout.shape), dout=dout)


def test_gradient_of_a_plain_sum(kernel, place):
    # Its dout is one number, expanded over all dimensions.
    x = torch.randn(3, 5, 96, **place, requires_grad=True)
    weight = torch.randn(96, **place, requires_grad=True)
    kernel.rms_norm(x, weight).sum().backward()
    again = x.detach().clone().requires_grad_()
    kernel.rms_norm(again, weight).backward(torch.ones_like(again))
    assert_same_bits("dx", x.grad, again.grad)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden_size", [64, 96, 1024])
def test_alignment_changes_no_result(kernel, place, norm, hidden_size):
    # Not the bits: other threads add up other columns.
    memory = torch.randn(17, hidden_size + 1, **place)
    inputs = {"x": memory[:, 1:], "weight": torch.randn(hidden_size + 1, **place)[1:]}
    check(kernel, norm, inputs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["heads of a fused projection", "heads before positions"])
def test_query_and_key_norms_read_views_in_place(kernel, bf16_place, norm, kind):
    x = views(bf16_place, kind)
    same_as_contiguous(kernel, norm, {"x": x, "weight": torch.randn(64, **bf16_place)})


def test_weights_of_any_stride(kernel, place):
    weight = torch.randn(96, 3, **place)[:, 1]
    check(kernel, "rms_norm", {"x": torch.randn(9, 96, **place), "weight": weight})
