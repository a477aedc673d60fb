"""RMSNorm against the formulas that models use, forward and backward."""

import pytest
import torch
from errors import assert_same_bits

from . import formulas
from .comparison import check, make_inputs, run_ours

# One below, at and above what kernels are written for, odd ones, models' own, and the limits
HIDDEN_SIZES = [1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 80, 127, 128, 192, 255, 256, 257, 264, 576]
HIDDEN_SIZES += [1000, 1023, 1024, 1028, 1032, 1536, 2048, 2560, 3584, 4096, 5120, 7168, 8192]
LARGE_SIZES = [8200, 12288, 16384, 16392, 32768, 32776, 65536, 65544, 65536 + 4, 131072, 131080]
LARGE_SIZES += [262144]
MODES = ["llama", "gemma", "none"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_hidden_sizes(kernel, place, hidden_size):
    check(kernel, "rms_norm", make_inputs(place, (5, hidden_size)))


@pytest.mark.parametrize("hidden_size", LARGE_SIZES)
def test_large_hidden_sizes(kernel, place, hidden_size):
    check(kernel, "rms_norm", make_inputs(place, (3, hidden_size)))


@pytest.mark.parametrize("has_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("hidden_size", [20000, 40960])
def test_more_long_rows_than_run_at_a_time(kernel, bf16_place, hidden_size, has_residual):
    inputs = make_inputs(bf16_place, (200, hidden_size), has_residual=has_residual)
    check(kernel, "rms_norm", inputs)


@pytest.mark.parametrize("hidden_size", [33, 128, 512, 1024, 4096])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 15, 16, 17, 63, 65, 127, 129, 1000, 2049])
def test_row_counts(kernel, bf16_place, rows, hidden_size):
    check(kernel, "rms_norm", make_inputs(bf16_place, (rows, hidden_size)))


@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 3, 96), (2, 1, 3, 96), (2, 2, 1, 2, 3, 96)])
def test_ranks(kernel, place, shape):
    check(kernel, "rms_norm", make_inputs(place, shape))


@pytest.mark.parametrize("casting_mode", MODES)
@pytest.mark.parametrize("hidden_size", [7, 128, 1024, 2560])
def test_casting_modes(kernel, place, casting_mode, hidden_size):
    inputs = make_inputs(place, (9, hidden_size))
    check(kernel, "rms_norm", inputs, casting_mode=casting_mode)


@pytest.mark.parametrize("casting_mode", MODES)
@pytest.mark.parametrize("weight_offset", [1.0, -0.5])
def test_weight_offset(kernel, place, casting_mode, weight_offset):
    inputs = make_inputs(place, (9, 256))
    check(kernel, "rms_norm", inputs, casting_mode=casting_mode, weight_offset=weight_offset)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [33, 64, 1024])
def test_weight_of_another_dtype(kernel, place, weight_dtype, hidden_size):
    inputs = make_inputs(place, (70, hidden_size), weight_dtype=weight_dtype)
    ours = check(kernel, "rms_norm", inputs)
    assert ours["out"].dtype == place["dtype"]


@pytest.mark.parametrize("casting_mode", MODES)
@pytest.mark.parametrize("hidden_size", [33, 1024])
def test_without_weight(kernel, place, casting_mode, hidden_size):
    inputs = make_inputs(place, (9, hidden_size), has_weight=False)
    check(kernel, "rms_norm", inputs, casting_mode=casting_mode)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_eps(kernel, place, eps):
    check(kernel, "rms_norm", make_inputs(place, (9, 64)), eps=eps)


@pytest.mark.parametrize("hidden_size", [7, 96, 1024, 4096, 16384])
@pytest.mark.parametrize("with_dresidual_out", [False, True], ids=["out only", "both gradients"])
@pytest.mark.parametrize("residual", ["same dtype", "float32", "kept in float32", "no residual"])
def test_residual(kernel, place, residual, with_dresidual_out, hidden_size):
    inputs = make_inputs(
        place,
        (19, hidden_size),
        has_residual=residual != "no residual",
        residual_dtype=torch.float32 if residual == "float32" else None,
    )
    check(
        kernel,
        "rms_norm",
        inputs,
        with_dresidual_out=with_dresidual_out,
        residual_in_fp32=residual in ("kept in float32", "no residual"),
    )


@pytest.mark.parametrize("hidden_size", [8192, 16384, 65536])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_residual_of_many_long_rows(kernel, place, norm, hidden_size):
    # Enough rows to be walked over, and three tensors to read, of which two steps may not fit in a
    # multiprocessor's memory.
    inputs = make_inputs(place, (131, hidden_size), has_residual=True)
    check(kernel, norm, inputs, with_dresidual_out=True, residual_in_fp32=True)


@pytest.mark.parametrize("casting_mode", MODES)
def test_residual_in_each_casting_mode(kernel, place, casting_mode):
    inputs = make_inputs(place, (19, 256), has_residual=True)
    check(kernel, "rms_norm", inputs, casting_mode=casting_mode, with_dresidual_out=True)


def exact_squares(place, shape) -> torch.Tensor:
    """Values whose squares sum up exactly in float32, so that the order of additions, in which no
    two implementations agree, changes no bit."""
    return torch.randint(-16, 17, shape, device=place["device"]).to(place["dtype"]) / 8


@pytest.mark.parametrize("hidden_size", [1, 7, 64, 128, 1024, 4096, 16384])
@pytest.mark.parametrize("casting_mode", MODES)
def test_same_bits_as_the_formula(kernel, place, casting_mode, hidden_size):
    x = exact_squares(place, (64, hidden_size))
    if casting_mode == "none" and place["dtype"] != torch.float32:
        x = x.sign()  # squares are rounded too: 1 and 0 stay what they are
    weight = torch.randn(hidden_size, **place)
    offset = 1.0 if casting_mode == "gemma" else 0.0
    options = {"weight_offset": offset, "casting_mode": casting_mode}
    ours = kernel.rms_norm(x, weight, 1e-6, **options)
    assert_same_bits("out", ours, formulas.rms_norm(x, weight, 1e-6, **options)[0])


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_same_bits_with_a_weight_of_another_dtype(kernel, place, weight_dtype):
    x = exact_squares(place, (64, 256))
    weight = torch.randn(256, device=place["device"], dtype=weight_dtype)
    expected = formulas.llama(x, weight, 1e-6).to(x.dtype)
    assert_same_bits("out", kernel.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("hidden_size", [7, 128, 1024, 4096])
def test_same_bits_as_the_formula_from_the_row_statistics(kernel, place, hidden_size):
    # Any values: everything after the sum of squares, from our own sum.
    x = torch.randn(64, hidden_size, **place)
    weight = torch.randn(hidden_size, **place)
    arguments = (x, None, weight, None, 1e-6, 0.0, 0, False, False, False)
    out, _, rstd = kernel._ops.ops.norm_fwd(*arguments)
    expected = weight * (x.float() * rstd[:, None]).to(x.dtype)
    assert_same_bits("out", out, expected)


def test_signs_of_zero(kernel, place):
    x = torch.tensor([[-0.0, 0.0, 1.0, -1.0]], **place)
    weight = torch.tensor([1.0, -1.0, -0.0, 0.0], **place)
    ours = kernel.rms_norm(x, weight)
    expected = formulas.llama(x, weight, 1e-6)
    assert torch.equal(torch.signbit(ours), torch.signbit(expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(kernel, place, value):
    x = torch.randn(5, 96, **place)
    clean = kernel.rms_norm(x, torch.ones(96, **place))
    x[2, 40] = value
    out = kernel.rms_norm(x, torch.ones(96, **place))
    assert out[2].isnan().any()
    for row in (0, 1, 3, 4):
        assert_same_bits("row", out[row], clean[row])


def test_result_of_a_row_does_not_depend_on_the_others(kernel, place):
    inputs = make_inputs(place, (70, 1024))
    whole = run_ours(kernel, "rms_norm", inputs, torch.ones_like(inputs["x"]))
    alone = dict(inputs, x=inputs["x"][41:42])
    single = run_ours(kernel, "rms_norm", alone, torch.ones_like(alone["x"]))
    assert_same_bits("out", whole["out"][41:42], single["out"])
    assert_same_bits("dx", whole["dx"][41:42], single["dx"])
