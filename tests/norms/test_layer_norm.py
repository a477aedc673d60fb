"""LayerNorm against its formula, forward and backward."""

import pytest
import torch
from errors import assert_within, tolerance

from . import formulas
from .comparison import check, make_inputs

HIDDEN_SIZES = [1, 2, 3, 7, 8, 33, 64, 128, 200, 256, 257, 264, 768, 1000, 1024, 1536, 4096, 5120]
LARGE_SIZES = [8192, 8200, 12288, 16384, 16392, 65536, 65536 + 4, 131072, 262144]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_hidden_sizes(kernel, place, hidden_size):
    check(kernel, "layer_norm", make_inputs(place, (5, hidden_size), has_bias=True))


@pytest.mark.parametrize("hidden_size", LARGE_SIZES)
def test_large_hidden_sizes(kernel, place, hidden_size):
    check(kernel, "layer_norm", make_inputs(place, (3, hidden_size), has_bias=True))


@pytest.mark.parametrize("hidden_size", [20000, 40960])
def test_more_long_rows_than_run_at_a_time(kernel, bf16_place, hidden_size):
    check(kernel, "layer_norm", make_inputs(bf16_place, (200, hidden_size), has_bias=True))


@pytest.mark.parametrize("hidden_size", [33, 128, 1024, 4096])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 65, 129, 1000])
def test_row_counts(kernel, bf16_place, rows, hidden_size):
    check(kernel, "layer_norm", make_inputs(bf16_place, (rows, hidden_size), has_bias=True))


@pytest.mark.parametrize("has_weight", [False, True], ids=["no weight", "weight"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("hidden_size", [33, 1024])
def test_weight_and_bias_are_optional(kernel, place, has_weight, has_bias, hidden_size):
    inputs = make_inputs(place, (9, hidden_size), has_weight=has_weight, has_bias=has_bias)
    check(kernel, "layer_norm", inputs)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_weight_and_bias_of_other_dtypes(kernel, place, weight_dtype, bias_dtype):
    inputs = make_inputs(
        place, (70, 96), has_bias=True, weight_dtype=weight_dtype, bias_dtype=bias_dtype
    )
    check(kernel, "layer_norm", inputs)


@pytest.mark.parametrize("hidden_size", [7, 96, 1024, 4096, 16384])
@pytest.mark.parametrize("with_dresidual_out", [False, True], ids=["out only", "both gradients"])
@pytest.mark.parametrize("residual", ["same dtype", "float32", "kept in float32", "no residual"])
def test_residual(kernel, place, residual, with_dresidual_out, hidden_size):
    inputs = make_inputs(
        place,
        (19, hidden_size),
        has_bias=True,
        has_residual=residual != "no residual",
        residual_dtype=torch.float32 if residual == "float32" else None,
    )
    check(
        kernel,
        "layer_norm",
        inputs,
        with_dresidual_out=with_dresidual_out,
        residual_in_fp32=residual in ("kept in float32", "no residual"),
    )


@pytest.mark.parametrize("hidden_size", [64, 1000, 4096])
def test_is_no_worse_than_torch(kernel, place, hidden_size):
    x, weight, bias = torch.randn(65, hidden_size, **place), *torch.randn(2, hidden_size, **place)
    expected, _ = formulas.layer_norm(x.double(), weight.double(), bias.double())
    in_torch = torch.nn.functional.layer_norm(x, (hidden_size,), weight, bias)
    ours = kernel.layer_norm(x, weight, bias)
    assert_within("out", ours, expected, tolerance(expected, in_torch))
