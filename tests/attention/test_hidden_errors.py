"""Errors whose cause torch's own text does not name: ints that are no int64, dtypes that the stable
interface has no number for, memory that is not there."""

import pytest
import torch

from .comparison import make_inputs
from .test_hostile_inputs import CPU, refused


@pytest.fixture
def inputs():
    return make_inputs(CPU, 2, 5, 7, (4, 2), 16)


@pytest.mark.parametrize("power", [63, 200, 1100])
@pytest.mark.parametrize("sign", [1, -1])
def test_ints_beyond_64_bits(kernel, inputs, power, sign):
    value = sign * 2**power
    if power == 1100:  # no float either
        refused("softmax_scale is ", kernel.flash_attn_func, **inputs, softmax_scale=value)
    refused("dropout_p is ", kernel.flash_attn_func, **inputs, dropout_p=value)
    if sign < 0 or power == 1100:
        refused("softcap is ", kernel.flash_attn_func, **inputs, softcap=value)
        refused("eps is ", kernel.rms_norm, inputs["q"], eps=value)


def test_dtypes_that_ops_have_no_number_for(kernel, inputs):
    strange = {
        name: torch.empty(tensor.shape, dtype=torch.float8_e8m0fnu)
        for name, tensor in inputs.items()
    }
    for name in ("q", "k", "v"):
        call = {**inputs, name: strange[name]}
        refused(f"{name} has dtype torch.float8_e8m0fnu", kernel.flash_attn_func, **call)
    caches = (strange["k"], inputs["v"])
    with_cache = kernel.flash_attn_with_kvcache
    refused("k_cache has dtype torch.float8_e8m0fnu", with_cache, inputs["q"], *caches)
    refused("x has dtype torch.float8_e8m0fnu", kernel.rms_norm, strange["q"])
    table = torch.empty(2, 1, dtype=torch.float8_e8m0fnu)
    for name in ("block_table", "page_table"):
        refused(f"{name} has dtype", with_cache, *inputs.values(), **{name: table})


def test_results_that_do_not_fit_into_memory(kernel):
    """Rows without strides, so that the inputs take none."""

    def rows(*shape):
        return torch.zeros(8).as_strided((*shape, 8), (*[0] * len(shape), 1))

    q, k = rows(1, 2**20, 2**21), rows(1, 1, 2**21)
    message = "not enough memory for the results of this call"
    for function in (kernel.flash_attn_func, kernel.flash_attn_with_kvcache):
        refused(message, function, q, k, k, error=RuntimeError)
    refused(message, kernel.rms_norm, rows(2**45), error=RuntimeError)
