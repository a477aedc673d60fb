"""Runs attention three times on the same inputs (ours, the reference in float64, the same formula
in torch at the inputs' dtype) and compares results and gradients by the rules of errors.py."""

import reference
import torch
from errors import (
    LSE_TOLERANCE,
    another_draw,
    assert_within,
    draws_for,
    float32_tolerance,
    poisoned_memory,
    tolerance,
)

DIFFERENTIABLE = ("q", "k", "v", "s_aux", "attn_bias")


def make_inputs(
    place,
    batch_size=2,
    seqlen_q=65,
    seqlen_k=None,
    heads=(4, 2),
    head_dim=64,
    head_dim_v=None,
) -> dict:
    """Dense q, k and v from a normal distribution."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    num_heads_q, num_heads_kv = heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return {
        "q": torch.randn(batch_size, seqlen_q, num_heads_q, head_dim, **place),
        "k": torch.randn(batch_size, seqlen_k, num_heads_kv, head_dim, **place),
        "v": torch.randn(batch_size, seqlen_k, num_heads_kv, head_dim_v, **place),
    }


def cumulative(lengths, device) -> torch.Tensor:
    """cu_seqlens of these lengths."""
    total = torch.tensor([0, *lengths]).cumsum(0)
    return total.to(device=device, dtype=torch.int32)


def longest(cu_seqlens) -> int:
    return int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0


def make_packed(
    place,
    lengths_q,
    lengths_k=None,
    heads=(4, 2),
    head_dim=64,
    head_dim_v=None,
    more_rows=0,
) -> dict:
    """Packed q, k, v and their index tensors; ``more_rows`` that no sequence covers at the end."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    dense = make_inputs(
        place,
        1,
        sum(lengths_q) + more_rows,
        sum(lengths_k) + more_rows,
        heads,
        head_dim,
        head_dim_v,
    )
    packed = {name: tensor[0] for name, tensor in dense.items()}
    packed["cu_seqlens_q"] = cumulative(lengths_q, place["device"])
    packed["cu_seqlens_k"] = cumulative(lengths_k, place["device"])
    return packed


def gradients(inputs, out, softmax_lse, dout, dsoftmax_lse) -> dict:
    names = [n for n in DIFFERENTIABLE if inputs.get(n) is not None]
    outputs, weights = [out], [dout]
    if dsoftmax_lse is not None:
        outputs.append(softmax_lse)
        weights.append(dsoftmax_lse)
    grads = torch.autograd.grad(outputs, [inputs[n] for n in names], weights, allow_unused=True)
    return {
        f"d{name}": torch.zeros_like(inputs[name]) if grad is None else grad
        for name, grad in zip(names, grads, strict=True)
    }


def with_gradients(inputs: dict, dtype=None) -> dict:
    """Leaves of their own that want a gradient, all floating tensors in ``dtype`` if given."""
    result = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach()
            if dtype is not None:
                value = value.to(dtype)
            value = value.requires_grad_() if name in DIFFERENTIABLE else value
        result[name] = value
    return result


def run_ours(kernel, inputs, dout=None, dsoftmax_lse=None, **options) -> dict:
    """Our results and gradients, in poisoned memory; ``dout`` is ones if None."""
    inputs = with_gradients(inputs)
    with poisoned_memory():
        if "cu_seqlens_q" in inputs:
            out, softmax_lse = kernel.flash_attn_varlen_func(
                **inputs,
                max_seqlen_q=longest(inputs["cu_seqlens_q"]),
                max_seqlen_k=longest(inputs["cu_seqlens_k"]),
                return_softmax_lse=True,
                **options,
            )
        else:
            out, softmax_lse = kernel.flash_attn_func(**inputs, return_softmax_lse=True, **options)
        dout = torch.ones_like(out) if dout is None else dout
        grads = gradients(inputs, out, softmax_lse, dout, dsoftmax_lse)
    return {"out": out.detach(), "softmax_lse": softmax_lse.detach(), **grads}


def run_formula(inputs, dout=None, dsoftmax_lse=None, dtype=None, **options) -> dict:
    """The same of the reference formulas, in ``dtype`` or the inputs' own."""
    inputs = with_gradients(inputs, dtype)
    options = {n: o for n, o in options.items() if n != "deterministic"}
    formula = reference.attention_varlen if "cu_seqlens_q" in inputs else reference.attention
    out, softmax_lse = formula(**inputs, **options)
    dout = torch.ones_like(out) if dout is None else dout.to(out.dtype)
    if dsoftmax_lse is not None:
        dsoftmax_lse = dsoftmax_lse.to(softmax_lse.dtype)
    grads = gradients(inputs, out, softmax_lse, dout, dsoftmax_lse)
    return {"out": out.detach(), "softmax_lse": softmax_lse.detach(), **grads}


def random_dout(inputs) -> torch.Tensor:
    q, v = inputs["q"], inputs["v"]
    return torch.randn(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)


def random_dlse(inputs) -> torch.Tensor:
    """Like softmax_lse."""
    shape = list(inputs["q"].shape[:-1])
    shape = [shape[0], shape[2], shape[1]] if len(shape) == 3 else shape[::-1]
    return torch.randn(shape, device=inputs["q"].device)


def allowed_errors(inputs, expected, **formula_options) -> dict:
    """What each result may differ by from ``expected``, the reference in float64."""
    if inputs["q"].dtype == torch.float32:
        # The longest sum behind any result: over keys, or rows of a group, or head_dim.
        group_size = inputs["q"].shape[-2] // inputs["k"].shape[-2]
        rows, keys = inputs["q"].shape[-3], inputs["k"].shape[-3]
        reduced_length = max(keys, rows * group_size) + inputs["q"].shape[-1]
        allowed = {n: float32_tolerance(e, reduced_length) for n, e in expected.items()}
    else:
        in_torch = run_formula(inputs, **formula_options)
        allowed = {n: tolerance(e, in_torch[n]) for n, e in expected.items()}
        for errors in more_errors_of_torch(inputs, formula_options):
            allowed = {n: max(allowed[n], errors[n]) for n in allowed}
    allowed["softmax_lse"] = LSE_TOLERANCE
    return allowed


def more_errors_of_torch(inputs, formula_options):
    """Tolerances from other values of the same kind, as many draws as make the largest error of a
    few rows one that torch usually makes, not one that it happened to make."""
    q, k = inputs["q"], inputs["k"]
    rows = min(q.shape[-3], k.shape[-3]) * q.shape[-2] * (q.shape[0] if q.dim() == 4 else 1)
    generator = torch.Generator(q.device).manual_seed(0)
    options = dict(formula_options)
    for _ in range(draws_for(rows) - 1):
        drawn = {n: x if n not in "qkv" else another_draw(x, generator) for n, x in inputs.items()}
        for name in ("dout", "dsoftmax_lse"):
            if options.get(name) is not None:
                options[name] = another_draw(formula_options[name], generator)
        exact = run_formula(drawn, dtype=torch.float64, **options)
        in_torch = run_formula(drawn, **options)
        yield {n: tolerance(e, in_torch[n]) for n, e in exact.items()}


def check(kernel, inputs, dout=None, dsoftmax_lse=None, ours_options=None, **options) -> dict:
    """Asserts that ours are within the derived tolerance of the reference; returns ours.

    ``options`` go to both; ``ours_options`` (deterministic, say) to ours alone.
    """
    dout = random_dout(inputs) if dout is None else dout
    ours = run_ours(kernel, inputs, dout, dsoftmax_lse, **options, **(ours_options or {}))
    expected = run_formula(inputs, dout, dsoftmax_lse, dtype=torch.float64, **options)
    allowed = allowed_errors(inputs, expected, dout=dout, dsoftmax_lse=dsoftmax_lse, **options)
    for name, reference_value in expected.items():
        assert_within(name, ours[name], reference_value, allowed[name])
    check_layout(inputs, ours)
    return ours


def check_layout(inputs, ours) -> None:
    q, v = inputs["q"], inputs["v"]
    assert ours["out"].shape == (*q.shape[:-1], v.shape[-1])
    assert ours["out"].dtype == q.dtype
    assert ours["softmax_lse"].dtype == torch.float32
    for name in DIFFERENTIABLE:
        if inputs.get(name) is not None:
            gradient = ours[f"d{name}"]
            assert gradient.shape == inputs[name].shape, name
            assert gradient.dtype == inputs[name].dtype, name
    for name, tensor in ours.items():
        assert tensor.is_contiguous(), f"{name} is not contiguous"
