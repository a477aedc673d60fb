"""Runs a norm three times on the same inputs (ours, the reference in float64, the same formula in
torch at the inputs' dtypes) and compares results and gradients by the rules of errors.py."""

import torch
from errors import (
    another_draw,
    assert_within,
    draws_for,
    float32_tolerance,
    poisoned_memory,
    tolerance,
)

from . import formulas

DIFFERENTIABLE = ("x", "residual", "weight", "bias")


def make_inputs(
    place,
    shape,
    *,
    weight_dtype=None,
    bias_dtype=None,
    residual_dtype=None,
    has_weight=True,
    has_bias=False,
    has_residual=False,
) -> dict:
    """x and the tensors asked for, from a normal distribution; weights around 1."""
    device, dtype = place["device"], place["dtype"]

    def randn(size, other_dtype):
        return torch.randn(size, device=device, dtype=other_dtype or dtype)

    inputs = {"x": randn(shape, None)}
    if has_residual:
        inputs["residual"] = randn(shape, residual_dtype)
    if has_weight:
        inputs["weight"] = 1 + randn(shape[-1:], weight_dtype) / 4
    if has_bias:
        inputs["bias"] = randn(shape[-1:], bias_dtype)
    return inputs


def leaves(inputs: dict, dtype=None) -> dict:
    """The same tensors (strides too) as leaves that want a gradient, in ``dtype`` if given."""
    result = {}
    for name, value in inputs.items():
        value = value.detach() if dtype is None else value.detach().to(dtype)
        result[name] = value.requires_grad_()
    return result


def gradients(inputs, outputs, douts) -> dict:
    pairs = [(o, d) for o, d in zip(outputs, douts, strict=True) if d is not None]
    grads = torch.autograd.grad(
        [o for o, _ in pairs], list(inputs.values()), [d for _, d in pairs], allow_unused=True
    )
    return {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}


def run_ours(kernel, norm, inputs, dout, dresidual_out=None, **options) -> dict:
    """Our results and gradients, in poisoned memory. ``norm``: "rms_norm" or "layer_norm"."""
    inputs = leaves(inputs)
    with poisoned_memory():
        out, residual_out = getattr(kernel, norm)(**inputs, prenorm=True, **options)
        grads = gradients(inputs, (out, residual_out), (dout, dresidual_out))
    return {"out": out.detach(), "residual_out": residual_out.detach(), **grads}


def run_formula(norm, inputs, dout, dresidual_out=None, dtype=None, **options) -> dict:
    """The same of the formulas, in ``dtype`` or the inputs' own."""
    inputs = leaves(inputs, dtype)
    out, residual_out = getattr(formulas, norm)(**inputs, **options)
    dout = dout.to(out.dtype)
    if dresidual_out is not None:
        dresidual_out = dresidual_out.to(residual_out.dtype)
    grads = gradients(inputs, (out, residual_out), (dout, dresidual_out))
    return {"out": out.detach(), "residual_out": residual_out.detach(), **grads}


def sum_dtype(inputs, residual_in_fp32=False) -> torch.dtype:
    """The dtype of x + residual."""
    residual = inputs.get("residual", inputs["x"])
    is_fp32 = residual_in_fp32 or residual.dtype == torch.float32
    return torch.float32 if is_fp32 else inputs["x"].dtype


def check(kernel, norm, inputs, *, with_dresidual_out=False, dout=None, **options) -> dict:
    """Asserts that ours are within the derived tolerance of the reference; returns ours."""
    x = inputs["x"]
    dout = torch.randn(x.shape, dtype=x.dtype, device=x.device) if dout is None else dout
    dresidual_out = None
    if with_dresidual_out:
        dtype = sum_dtype(inputs, options.get("residual_in_fp32", False))
        dresidual_out = torch.randn(x.shape, dtype=dtype, device=x.device)
    ours = run_ours(kernel, norm, inputs, dout, dresidual_out, **options)
    expected = run_formula(norm, inputs, dout, dresidual_out, dtype=torch.float64, **options)
    in_torch = run_formula(norm, inputs, dout, dresidual_out, **options)
    dtypes = {name: result.dtype for name, result in ours.items()}
    allowed = errors_of_torch(expected, in_torch, dtypes)
    rows = x.numel() // x.shape[-1]
    if x.dtype == torch.float32:
        for name, reference in expected.items():
            reduced = max(rows, 1) if name in ("dweight", "dbias") else x.shape[-1]
            allowed[name] = max(allowed[name], float32_tolerance(reference, reduced))
    else:
        for more in more_errors_of_torch(norm, inputs, dout, dresidual_out, dtypes, options):
            allowed = {name: max(allowed[name], error) for name, error in more.items()}
    for name, reference in expected.items():
        assert_within(name, ours[name], reference, allowed[name])
    check_layout(inputs, ours, options)
    return ours


def errors_of_torch(expected, in_torch, dtypes) -> dict:
    """What each result may differ by. The dtype it is rounded to may be coarser than torch's."""
    return {n: tolerance(e, in_torch[n].to(dtypes[n])) for n, e in expected.items()}


def more_errors_of_torch(norm, inputs, dout, dresidual_out, dtypes, options):
    """Tolerances from other values of the same kind, as many draws as make the largest error of the
    few columns of dweight and dbias one that torch usually makes, not one that it happened to."""
    x = inputs["x"]
    generator = torch.Generator(x.device).manual_seed(0)
    for _ in range(draws_for(x.shape[-1]) - 1):
        drawn = {name: another_draw(tensor, generator) for name, tensor in inputs.items()}
        douts = [None if d is None else another_draw(d, generator) for d in (dout, dresidual_out)]
        exact = run_formula(norm, drawn, *douts, dtype=torch.float64, **options)
        in_torch = run_formula(norm, drawn, *douts, **options)
        yield errors_of_torch(exact, in_torch, dtypes)


def check_layout(inputs, ours, options) -> None:
    x = inputs["x"]
    assert ours["out"].shape == x.shape
    assert ours["out"].dtype == x.dtype
    assert ours["out"].is_contiguous()
    assert ours["residual_out"].dtype == sum_dtype(inputs, options.get("residual_in_fp32", False))
    for name, tensor in inputs.items():
        gradient = ours[f"d{name}"]
        assert gradient.shape == tensor.shape, name
        assert gradient.dtype == tensor.dtype, name
