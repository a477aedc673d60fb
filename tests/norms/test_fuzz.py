"""Random shapes, strides, dtypes and options together, forward and backward, against the reference.

Hypothesis chooses the cases, the same ones in every run (``derandomize``); a case that fails is
printed with its seed, and ``run_case(kernel, device, case)`` repeats it.
"""

import pytest
import torch
from errors import surrounded_by_nan

pytest.importorskip("hypothesis", reason="not needed to use the kernels: requirements/test.txt")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .comparison import check, make_inputs

FIXED = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
# Around the sizes at which the kernels change: threads, packs and CTAs a row, few rows.
ROWS = [0, 1, 2, 3, 127, 128, 129, 130, 257, 1000]
HIDDEN_SIZES = [1, 7, 8, 9, 16, 64, 96, 127, 128, 250, 256, 264, 1000, 1024, 1032, 2048, 2056]
LONG_HIDDEN_SIZES = [4096, 5000, 8192, 8200, 16384, 16392, 20000, 32768, 65536, 65544, 131080]
LAYOUTS = {
    "contiguous": lambda x: x,
    "gaps": surrounded_by_nan,
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def cases(dtypes, hidden_sizes, most_elements):
    """Flat dicts of numbers and names, from which run_case() makes the tensors."""
    dtype = st.sampled_from(dtypes)
    return st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["rms_norm", "layer_norm"]),
            "dtype": dtype,
            "rows": st.one_of(st.sampled_from(ROWS), st.integers(1, 300)),
            "groups": st.integers(1, 3),
            "hidden_size": st.one_of(st.sampled_from(hidden_sizes), st.integers(1, 300)),
            "most_elements": st.just(most_elements),
            "layouts": st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 2),
            "weight_dtype": st.one_of(st.just("own"), dtype),
            "bias_dtype": st.one_of(st.just("own"), st.none(), dtype),
            "has_weight": st.sampled_from([True, True, True, False]),
            "residual": st.sampled_from([None, None, "own", "float32"]),
            "residual_in_fp32": st.sampled_from([False, False, True]),
            "dresidual_out": st.booleans(),
            "casting_mode": st.sampled_from(["llama", "gemma", "none"]),
            "weight_offset": st.sampled_from([0.0, 0.0, 1.0, -0.5]),
            "seed": st.integers(0, 2**31),
        }
    )


def run_case(kernel, device, case):
    torch.manual_seed(case["seed"])
    is_rms = case["norm"] == "rms_norm"
    hidden_size = case["hidden_size"]
    rows = min(case["rows"], max(1, case["most_elements"] // (hidden_size * case["groups"])))
    place = {"device": device, "dtype": getattr(torch, case["dtype"])}

    def named(dtype):
        return None if dtype in (None, "own") else getattr(torch, dtype)

    inputs = make_inputs(
        place,
        (case["groups"], rows, hidden_size),
        weight_dtype=named(case["weight_dtype"]),
        bias_dtype=named(case["bias_dtype"]),
        residual_dtype=named(case["residual"]),
        has_weight=case["has_weight"],
        has_bias=not is_rms and case["bias_dtype"] is not None,
        has_residual=case["residual"] is not None,
    )
    for name, layout in zip(("x", "residual"), case["layouts"], strict=True):
        if name in inputs:
            inputs[name] = LAYOUTS[layout](inputs[name])
    options = {"residual_in_fp32": case["residual_in_fp32"]}
    if is_rms:
        options["casting_mode"] = case["casting_mode"]
        if case["has_weight"]:
            options["weight_offset"] = case["weight_offset"]
    check(
        kernel,
        case["norm"],
        inputs,
        with_dresidual_out=case["dresidual_out"],
        **options,
    )


@given(case=cases(["float32", "bfloat16", "float16"], HIDDEN_SIZES, 200_000))
@settings(max_examples=60, **FIXED)
def test_fuzz_cpu(kernel, case):
    run_case(kernel, torch.device("cpu"), case)


@pytest.mark.gpu
@given(case=cases(["float32", "bfloat16", "float16"], HIDDEN_SIZES, 1_000_000))
@settings(max_examples=60, **FIXED)
def test_fuzz_gpu(kernel, case):
    run_case(kernel, torch.device("cuda"), case)


@pytest.mark.gpu
@given(case=cases(["float32", "bfloat16", "float16"], LONG_HIDDEN_SIZES, 2_000_000))
@settings(max_examples=25, **FIXED)
def test_fuzz_gpu_long_rows(kernel, case):
    run_case(kernel, torch.device("cuda"), case)
