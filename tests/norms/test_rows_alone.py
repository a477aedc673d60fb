"""A row's results are the same bits however many rows a call has.

Which kernel runs may depend on the number of rows; in which order the elements of a row are added
up may not. Sizes and numbers of rows lie on both sides of every change of kernel.
"""

import pytest
import torch
from errors import assert_same_bits, poisoned_memory

from .comparison import leaves, make_inputs

FEWER_ROWS = [1, 8, 128, 129]
# Short rows, rows whose threads have unlike shares, one CTA, clusters; and what fits no pack.
SIZES = [64, 96, 250, 256, 264, 520, 1000, 1024, 1536, 2056, 3584, 4096]
LONG_SIZES = [4104, 7680, 8192, 8200, 9001, 12288, 16384, 32768, 65536, 65544]
KINDS = {
    "rms": ("rms_norm", {}, {}),
    "gemma": ("rms_norm", {"weight_dtype": torch.float32}, {"casting_mode": "gemma"}),
    "none": ("rms_norm", {"has_weight": False}, {"casting_mode": "none"}),
    "add_rms": ("rms_norm", {"has_residual": True}, {}),
    "wide_add_rms": ("rms_norm", {"has_residual": True}, {"residual_in_fp32": True}),
    "layer": ("layer_norm", {"has_bias": True}, {}),
    "layer_without_weight": ("layer_norm", {"has_weight": False}, {}),
    "add_layer": ("layer_norm", {"has_bias": True, "has_residual": True}, {}),
    "wide_add_layer": ("layer_norm", {"has_residual": True}, {"residual_in_fp32": True}),
}


def run(kernel, norm, inputs, douts, **options) -> dict:
    """out, residual_out and the gradients of the rows; the sum has a gradient with a residual."""
    inputs = leaves(inputs)
    rows = [name for name in inputs if name in ("x", "residual")]
    with poisoned_memory():
        outputs = getattr(kernel, norm)(**inputs, prenorm=True, **options)
        used = outputs if "residual" in inputs else outputs[:1]
        # With the weight's gradient, which takes part in the choice of kernel.
        wanted = [inputs[name] for name in inputs]
        grads = torch.autograd.grad(used, wanted, douts[: len(used)])
    results = {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True) if name in rows}
    return {"out": outputs[0].detach(), "residual_out": outputs[1].detach(), **results}


def check_rows_alone(kernel, place, norm, num_rows, hidden_size, asked, options, narrow=None):
    inputs = make_inputs(place, (num_rows, hidden_size), **asked)
    is_wide = options.get("residual_in_fp32", False)
    dout = torch.randn(num_rows, hidden_size, **place)
    dsum = dout.new_empty(dout.shape, dtype=torch.float32 if is_wide else None).normal_()
    if narrow is not None:
        inputs = {n: narrow(t) if t.dim() == 2 else t for n, t in inputs.items()}
    every = run(kernel, norm, inputs, (dout, dsum), **options)
    for count in FEWER_ROWS:
        # The last rows, which lie elsewhere in a grid than where they are the first.
        first = num_rows - count
        fewer = {n: t[first:] if t.dim() == 2 else t for n, t in inputs.items()}
        results = run(kernel, norm, fewer, (dout[first:], dsum[first:]), **options)
        for name, result in results.items():
            assert_same_bits(f"{name} of {count} rows", result, every[name][first:])


@pytest.mark.parametrize("hidden_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_alone(kernel, place, kind, hidden_size):
    norm, asked, options = KINDS[kind]
    check_rows_alone(kernel, place, norm, 1000, hidden_size, asked, options)


@pytest.mark.parametrize("hidden_size", LONG_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_alone(kernel, place, kind, hidden_size):
    norm, asked, options = KINDS[kind]
    # On a CPU, which is slow, a few more than the most that take other kernels on a GPU.
    num_rows = 1000 if place["device"].type == "cuda" and hidden_size < 20000 else 131
    check_rows_alone(kernel, place, norm, num_rows, hidden_size, asked, options)


@pytest.mark.parametrize("hidden_size", [64, 1000, 4096, 16384])
@pytest.mark.parametrize("kind", ["rms", "add_rms", "layer", "add_layer"])
def test_rows_alone_that_are_not_aligned(kernel, place, kind, hidden_size):
    norm, asked, options = KINDS[kind]

    def narrow(tensor):
        padded = tensor.new_empty(tensor.shape[0], hidden_size + 16)
        padded[:, 1 : hidden_size + 1] = tensor
        return padded[:, 1 : hidden_size + 1]

    num_rows = 1000 if hidden_size < 5000 else 131
    check_rows_alone(kernel, place, norm, num_rows, hidden_size, asked, options, narrow)
