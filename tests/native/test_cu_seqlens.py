"""No value of an index tensor leads outside the tensor that it indexes."""

import itertools

import pytest

EXTREMES = [-(2**31), -7, -1, 0, 3, 10, 11, 2**31 - 1]


@pytest.mark.parametrize("total", [0, 1, 10])
def test_rows_lie_inside(native, total):
    for bounds in itertools.product(EXTREMES, EXTREMES):
        begin, end = native.packed_rows(list(bounds), 0, total)
        assert 0 <= begin <= end <= total, bounds


def test_valid_bounds_are_kept(native):
    assert native.packed_rows([0, 4, 4, 10], 0, 10) == (0, 4)
    assert native.packed_rows([0, 4, 4, 10], 1, 10) == (4, 4)
    assert native.packed_rows([0, 4, 4, 10], 2, 10) == (4, 10)
