"""e4m3 to and from other types, against torch's conversions."""

import itertools
import math
import random
import struct

import pytest
import torch

CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(torch.float8_e4m3fn).float().tolist()


def same(a: float, b: float) -> bool:
    return math.isnan(a) if math.isnan(b) else (a, math.copysign(1, a)) == (b, math.copysign(1, b))


def test_every_number_as_float(native):
    for code, number in enumerate(NUMBERS):
        assert same(native.e4m3_to_float(code), number), code


def test_rounding(native):
    """Numbers, their neighbours' middles, and the floats beside these."""
    finite = sorted(x for x in NUMBERS if not math.isnan(x))
    middles = [(a + b) / 2 for a, b in itertools.pairwise(finite)]
    values = torch.tensor(finite + middles + [1e-40, 2.0**-10, 2.0**-11, 449.0, 1e30, math.inf])
    values = torch.cat([values, -values])
    values = torch.cat([values, values.nextafter(values + 1), values.nextafter(values - 1)])
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for value, code in zip(values.tolist(), expected.tolist(), strict=True):
        assert native.float_to_e4m3(value) == code, value
    for code in range(256):
        if not math.isnan(NUMBERS[code]):
            assert native.float_to_e4m3(NUMBERS[code]) == code
    for nan in (math.nan, -math.nan):
        assert native.float_to_e4m3(nan) & 0x7F == 0x7F


@pytest.mark.parametrize("place", range(4))
def test_four_at_a_time(native, place):
    """As float16 divided by 256, whatever the other three are."""
    rng = random.Random(place)
    for code, number in enumerate(NUMBERS):
        for other in (0, 0xFFFFFFFF, 0x7F7F7F7F, rng.getrandbits(32)):
            word = other & ~(0xFF << 8 * place) | code << 8 * place
            half = native.e4m3_to_scaled_float16(word)[place % 2] >> 16 * (place // 2) & 0xFFFF
            value = struct.unpack("<e", struct.pack("<H", half))[0]
            assert same(value * 256, number), hex(word)
