"""Which blocks a loop visits, against the definition of a mask spelt out entry by entry."""

import itertools

import pytest
from reference import visible_keys

LENGTHS = [(1, 1), (5, 5), (7, 3), (3, 7), (1, 9), (9, 1), (0, 4), (4, 0)]
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (2, -1), (2, 0), (0, 2), (3, 1), (-1, 2), (100, 100), (1, 0)]


@pytest.mark.parametrize("seqlens", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_ranges_hold_what_is_visible(native, seqlens, window):
    seqlen_q, seqlen_k = seqlens
    mask = native.Mask(seqlen_q, seqlen_k, *window)
    visible = visible_keys(seqlen_q, seqlen_k, window_size=window)

    for begin, end in itertools.combinations(range(seqlen_q + 1), 2):
        seen = visible[begin:end].any(dim=0).nonzero().flatten().tolist()
        first, last = mask.keys(begin, end)
        # A band's rows see one run of keys together, so the range is exact, not only enough.
        assert list(range(first, last)) == seen, (begin, end)

    for begin, end in itertools.combinations(range(seqlen_k + 1), 2):
        seeing = visible[:, begin:end].any(dim=1).nonzero().flatten().tolist()
        first, last = mask.rows(begin, end)
        assert list(range(first, last)) == seeing, (begin, end)


@pytest.mark.parametrize("seqlens", LENGTHS[:6])
@pytest.mark.parametrize("window", WINDOWS)
def test_covers_means_no_entry_is_masked(native, seqlens, window):
    seqlen_q, seqlen_k = seqlens
    mask = native.Mask(seqlen_q, seqlen_k, *window)
    visible = visible_keys(seqlen_q, seqlen_k, window_size=window)
    rows = list(itertools.combinations(range(seqlen_q + 1), 2))
    keys = list(itertools.combinations(range(seqlen_k + 1), 2))
    for (row, row_end), (key, key_end) in itertools.product(rows, keys):
        everything = bool(visible[row:row_end, key:key_end].all())
        assert mask.covers(row, row_end, key, key_end) == everything, (row, row_end, key, key_end)


def test_covers_nothing_behind_the_ends(native):
    mask = native.Mask(4, 6, -1, -1)
    assert mask.covers(0, 4, 0, 6)
    assert not mask.covers(0, 5, 0, 6)
    assert not mask.covers(0, 4, 0, 7)


def test_bounds_far_beyond_the_keys(native):
    """No sum of positions and bounds may leave 64 bits or wrap in 32."""
    far = 2**40
    mask = native.Mask(3, 5, far, far)
    assert mask.keys(0, 3) == (0, 5)
    assert mask.rows(0, 5) == (0, 3)
    assert mask.covers(0, 3, 0, 5)
