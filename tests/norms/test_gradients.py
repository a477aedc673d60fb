"""What a backward pass gives, leaves out and leaves alone."""

import pytest
import torch
from errors import assert_same_bits, assert_zero, poisoned_memory

from .comparison import make_inputs, run_ours

NORMS = ["rms_norm", "layer_norm"]


def norm_inputs(place, norm, shape, **options):
    return make_inputs(place, shape, has_bias=norm == "layer_norm", **options)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(1000, 128), (500, 1024), (300, 4096), (70, 33), (40, 16384)])
def test_same_bits_each_time(kernel, bf16_place, norm, shape):
    inputs = norm_inputs(bf16_place, norm, shape)
    dout = torch.randn(shape, **bf16_place)
    first = run_ours(kernel, norm, inputs, dout)
    for _ in range(5):
        again = run_ours(kernel, norm, inputs, dout)
        for name, value in first.items():
            assert_same_bits(name, again[name], value)


@pytest.mark.parametrize("norm", NORMS)
def test_same_bits_with_any_number_of_threads(kernel, norm):
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    inputs = norm_inputs(place, norm, (333, 96))
    dout = torch.randn(333, 96, **place)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(run_ours(kernel, norm, inputs, dout))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, value in results[0].items():
            assert_same_bits(name, other[name], value)


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_are_left_alone(kernel, place, norm):
    inputs = norm_inputs(place, norm, (9, 96), has_residual=True)
    dout, dresidual_out = torch.randn(2, 9, 96, **place)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    dout_copy, dresidual_out_copy = dout.clone(), dresidual_out.clone()
    run_ours(kernel, norm, inputs, dout, dresidual_out)
    for name, copy in copies.items():
        assert_same_bits(name, inputs[name], copy)
    assert_same_bits("dout", dout, dout_copy)
    assert_same_bits("dresidual_out", dresidual_out, dresidual_out_copy)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden_size", [33, 128, 1024])
def test_frozen_weight_has_no_gradient_and_costs_none(kernel, place, norm, hidden_size):
    inputs = norm_inputs(place, norm, (65, hidden_size))
    dout = torch.randn(65, hidden_size, **place)
    trained = run_ours(kernel, norm, inputs, dout)
    x = inputs["x"].clone().requires_grad_()
    parameters = [inputs[name] for name in ("weight", "bias") if name in inputs]
    getattr(kernel, norm)(x, *parameters).backward(dout)
    assert_same_bits("dx", x.grad, trained["dx"])
    assert all(parameter.grad is None for parameter in parameters)

    stats = kernel._ops.ops.norm_fwd(
        x.detach(), None, inputs["weight"], None, 1e-6, 0.0, 0, False, False, False
    )[2]
    arguments = (dout, None, x.detach(), inputs["weight"], None, stats, 0.0, 0, False, False)
    _, _, dweight, dbias = kernel._ops.ops.norm_bwd(*arguments, False, False)
    assert dweight.numel() == dbias.numel() == 0


def test_only_the_weight_is_trained(kernel, place):
    inputs = make_inputs(place, (65, 96))
    dout = torch.randn(65, 96, **place)
    expected = run_ours(kernel, "rms_norm", inputs, dout)
    weight = inputs["weight"].clone().requires_grad_()
    kernel.rms_norm(inputs["x"], weight).backward(dout)
    assert_same_bits("dweight", weight.grad, expected["dweight"])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(0, 96), (3, 0, 96), (0, 33)])
def test_no_rows(kernel, place, norm, shape):
    inputs = norm_inputs(place, norm, shape, has_residual=True)
    ours = run_ours(kernel, norm, inputs, torch.empty(shape, **place), torch.empty(shape, **place))
    assert ours["out"].shape == ours["residual_out"].shape == ours["dx"].shape == shape
    # Zeros and not None: every rank of a group has the same gradients to reduce.
    assert_zero("dweight", ours["dweight"])
    if norm == "layer_norm":
        assert_zero("dbias", ours["dbias"])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32], ids=["same", "float32"])
def test_only_the_residual_is_used(kernel, place, norm, residual_dtype):
    inputs = norm_inputs(place, norm, (9, 96), has_residual=True, residual_dtype=residual_dtype)
    x, residual = inputs["x"].requires_grad_(), inputs["residual"].requires_grad_()
    _, residual_out = getattr(kernel, norm)(x, inputs["weight"], residual=residual, prenorm=True)
    dresidual_out = torch.randn_like(residual_out)
    residual_out.backward(dresidual_out)
    assert_same_bits("dresidual", residual.grad, dresidual_out.to(residual.dtype))
    assert_same_bits("dx", x.grad, dresidual_out.to(x.dtype))


@pytest.mark.parametrize("norm", NORMS)
def test_sum_is_not_kept_without_a_gradient(kernel, place, norm):
    inputs = norm_inputs(place, norm, (9, 96), has_residual=True)
    expected, _ = getattr(kernel, norm)(**inputs, prenorm=True)
    with torch.no_grad():
        assert_same_bits("out", getattr(kernel, norm)(**inputs), expected)
    assert_same_bits("out", getattr(kernel, norm)(**inputs), expected)


def test_prenorm_without_residual_gives_x_itself(kernel, place):
    x = torch.randn(9, 96, **place, requires_grad=True)
    out, residual_out = kernel.rms_norm(x, prenorm=True)
    assert residual_out is x
    (out.sum() + residual_out.sum()).backward()
    alone = x.detach().clone().requires_grad_()
    kernel.rms_norm(alone).sum().backward()
    assert_same_bits("dx", x.grad, alone.grad + 1)


def test_float32_sum_of_16_bit_terms(kernel, bf16_place):
    inputs = make_inputs(bf16_place, (9, 96), has_residual=True)
    _, residual_out = kernel.rms_norm(**inputs, prenorm=True, residual_in_fp32=True)
    assert_same_bits("residual_out", residual_out, inputs["x"].float() + inputs["residual"].float())


def test_every_row_counts_in_the_weight_gradient(kernel, place):
    for rows in (1, 5, 64, 1025):
        inputs = make_inputs(place, (rows, 32))
        dout = torch.zeros(rows, 32, **place)
        dout[-1] = 1
        ours = run_ours(kernel, "rms_norm", inputs, dout)
        assert (ours["dweight"] != 0).all()
        assert_zero("dx", ours["dx"][:-1])


@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(kernel, fp32_place, norm):
    # In float32, the widest dtype there is, against differences of the reference in float64.
    inputs = norm_inputs(fp32_place, norm, (3, 5), has_residual=True)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]

    def function(*tensors):
        return getattr(kernel, norm)(**dict(zip(inputs, tensors, strict=True)))

    # eps: the step whose rounding error in float32 equals the error of the difference quotient
    torch.autograd.gradcheck(function, leaves, eps=2**-8, atol=2e-3, rtol=1e-2)


def test_second_derivative_is_refused(kernel, place):
    x = torch.randn(3, 8, **place, requires_grad=True)
    (dx,) = torch.autograd.grad(kernel.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("norm", NORMS)
def test_stack_of_norms_with_residuals(kernel, place, norm):
    # A gradient that is still needed elsewhere must not be overwritten by a backward pass.
    weights = [torch.randn(64, **place) for _ in range(2)]
    x = torch.randn(9, 64, **place, requires_grad=True)

    def model(function):
        inner = function(x, weights[0])
        return function(torch.sin(inner), weights[1]) + x

    def in_torch(x, weight):
        functional = torch.nn.functional
        name = functional.rms_norm if norm == "rms_norm" else functional.layer_norm
        return name(x.float(), (64,), weight.float(), eps=1e-5).to(x.dtype)

    def ours(x, weight):
        return getattr(kernel, norm)(x, weight, eps=1e-5)

    dout = torch.randn(9, 64, **place)
    with poisoned_memory():
        (dx,) = torch.autograd.grad(model(ours), x, dout)
    (expected,) = torch.autograd.grad(model(in_torch), x, dout)
    step = torch.finfo(place["dtype"]).eps
    assert torch.allclose(dx, expected, rtol=16 * step, atol=16 * step * expected.abs().max())
