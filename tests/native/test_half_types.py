"""Conversions of 16-bit floats against torch's: every value, every rounding."""

import math

import pytest
import torch

CONVERSIONS = [("fp16", torch.float16), ("bf16", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), CONVERSIONS)
def test_every_value_to_float(native, name, dtype):
    bits = torch.arange(2**16, dtype=torch.int32)
    expected = bits.to(torch.int16).view(dtype).float()
    convert = getattr(native, f"{name}_to_float")
    ours = torch.tensor([convert(int(b)) for b in bits])
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan].view(torch.int32), expected[~nan].view(torch.int32))


@pytest.mark.parametrize(("name", "dtype"), CONVERSIONS)
def test_rounding_to_nearest_even(native, name, dtype):
    """Each representable value, the midpoint to its neighbour and the floats beside that."""
    bits = torch.arange(0, 0x7C00 if name == "fp16" else 0x7F80, 3, dtype=torch.int32)
    low = bits.to(torch.int16).view(dtype).float()
    high = (bits + 1).to(torch.int16).view(dtype).float()
    finite = high.isfinite()
    middle = ((low.double() + high.double()) / 2).float()[finite]
    inf = torch.full_like(middle, math.inf)
    values = torch.cat([low, middle, torch.nextafter(middle, -inf), torch.nextafter(middle, inf)])
    values = torch.cat([values, -values, torch.tensor([65519.0, 65520.0, 1e30, math.inf, 3e38])])
    expected = values.to(dtype).view(torch.int16)
    convert = getattr(native, f"float_to_{name}")
    ours = torch.tensor([convert(v) for v in values.tolist()], dtype=torch.int32)
    assert torch.equal(ours.to(torch.int16), expected)


@pytest.mark.parametrize(("name", "dtype"), CONVERSIONS)
def test_nan_stays_nan(native, name, dtype):
    bits = getattr(native, f"float_to_{name}")(math.nan)
    assert torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(dtype).isnan().all()
