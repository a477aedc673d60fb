"""Which blocks the GPU kernels visit, and where packed sequences' blocks find their CTAs."""

import itertools
import random

import pytest
from reference import visible_keys

SEQLENS = [(1, 1), (33, 33), (40, 17), (17, 40), (70, 3), (3, 70)]
WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, -1), (20, 0), (3, 40), (100, 100), (2**40, 1)]
BLOCKS = [(16, 16), (16, 32), (64, 16)]


def blocks_of(count: int, block: int) -> list:
    """[(first row, one past the last row)] of each block."""
    return [(i, min(i + block, count)) for i in range(0, count, block)]


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_both_passes_visit_the_blocks_with_visible_entries(native, seqlens, window, block):
    mask = native.Mask(*seqlens, *window)
    visible = visible_keys(*seqlens, window_size=window)
    queries, keys = blocks_of(seqlens[0], block[0]), blocks_of(seqlens[1], block[1])
    from_queries, from_keys = set(), set()
    for m, rows in enumerate(queries):
        begin, end, full_begin, full_end = native.key_blocks(mask, *rows, block[1])
        from_queries |= {(m, n) for n in range(begin, end)}
        for n in range(max(begin, full_begin), min(end, full_end)):
            columns = slice(n * block[1], (n + 1) * block[1])
            assert (n + 1) * block[1] <= seqlens[1]
            assert visible[slice(*rows), columns].all()
    for n, columns in enumerate(keys):
        begin, end, full_begin, full_end = native.query_blocks(mask, *columns, block[0])
        from_keys |= {(m, n) for m in range(begin, end)}
        for m in range(max(begin, full_begin), min(end, full_end)):
            rows = slice(m * block[0], (m + 1) * block[0])
            assert (m + 1) * block[0] <= seqlens[0]
            assert visible[rows, slice(*columns)].all()
    # Deterministic sums count on it: a block of queries waits for the key blocks that meet it.
    assert from_queries == from_keys
    for (m, rows), (n, columns) in itertools.product(enumerate(queries), enumerate(keys)):
        if visible[slice(*rows), slice(*columns)].any():
            assert (m, n) in from_queries


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("more_rows", [0, 1, 200])
def test_every_block_of_every_sequence_has_one_slot(native, block, more_rows):
    generator = random.Random(block + more_rows)
    for _ in range(50):
        lengths = [generator.choice([0, 1, 15, 16, 17, 64, 300]) for _ in range(9)]
        cu_seqlens = [0, *itertools.accumulate(lengths)]
        total = cu_seqlens[-1] + more_rows
        slots = native.block_slots(cu_seqlens, total, block)
        assert len(slots) == len(set(slots))
        # The rows behind the last sequence count as one more.
        for batch, length in enumerate([*lengths, more_rows]):
            for i in range((length + block - 1) // block):
                assert (batch, i) in slots
