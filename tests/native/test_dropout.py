"""The dropout mask as C++ computes it."""

import pytest
import reference
import torch

ONES = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]

# The known answers that come with the generator's paper (Salmon et al., SC 2011).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (PI, [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(native, counter, key, answer):
    assert native.philox_4x32_10(*counter, *key) == answer


@pytest.mark.parametrize("rng_state", [(0, 0), (12345, 8), (-1, 2**40 + 3), (2**62, -5)])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.99])
def test_mask_is_the_documented_function(native, rng_state, dropout_p):
    rows, keys, num_heads = 37, 51, 3
    expected = reference.dropout_keep(rng_state, dropout_p, 2, num_heads, rows, keys)
    for head in range(num_heads):
        mask = native.dropout_mask(*rng_state, dropout_p, 2 * num_heads + head, rows, keys)
        assert torch.equal(torch.tensor(mask), expected[head])


def test_share_of_kept_entries(native):
    """Within five standard deviations of the binomial distribution."""
    rows = keys = 512
    kept = torch.tensor(native.dropout_mask(7, 11, 0.3, 0, rows, keys)).sum().item()
    mean, deviation = rows * keys * 0.7, (rows * keys * 0.3 * 0.7) ** 0.5
    assert abs(kept - mean) < 5 * deviation
