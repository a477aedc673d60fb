"""The order in which the Hopper backward pass takes its tiles."""

import heapq

import pytest

# (batch_size, num_heads_q, num_heads_kv, seqlen, head_splits, tiles at once)
PROBLEMS = [
    (1, 1, 1, 1, 1, 132),
    (2, 4, 4, 300, 1, 132),
    (1, 16, 16, 16384, 1, 132),
    (8, 16, 16, 2048, 1, 132),
    (4, 32, 8, 4096, 1, 132),
    (1, 8, 2, 500, 4, 132),
    (3, 5, 1, 1000, 5, 66),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_tile_comes_once(native, problem):
    *sizes, tiles_at_once = problem
    batch_size, _, num_heads_kv, seqlen, head_splits = sizes
    tiles, _, _ = native.bwd_tiles(*sizes, 128, tiles_at_once)
    blocks = -(-seqlen // 128)
    units = batch_size * num_heads_kv * head_splits
    assert sorted(tiles) == [(unit, block) for unit in range(units) for block in range(blocks)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_units_wait_for_earlier_tiles_only(native, problem):
    """A unit takes the place of an earlier one when that one's last tile is done, and adds to sums
    that the tiles of an earlier one zero as they begin."""
    *sizes, tiles_at_once = problem
    tiles, at_work, places = native.bwd_tiles(*sizes, 128, tiles_at_once)
    first, last = {}, {}
    for index, (unit, _) in enumerate(tiles):
        first.setdefault(unit, index)
        last[unit] = index
    assert 1 <= places <= len(first)
    for unit in range(places, len(first)):
        assert last[unit - places] < first[unit]
        # What runs beside it has places, too: nobody waits in the ordinary course of things.
        assert first[unit] - last[unit - places] > tiles_at_once // 2
    for unit in range(at_work, len(first)):
        assert first[unit] - last[unit - at_work] > tiles_at_once


def makespan(tiles, blocks, tiles_at_once) -> int:
    """Steps until all tiles are done, each taken by the first CTA that is free."""
    busy_until = [0] * tiles_at_once
    for _, block in tiles:
        heapq.heapreplace(busy_until, busy_until[0] + blocks - block)
    return max(busy_until)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048, 4096])
def test_causal_tiles_end_together(native, seqlen):
    """Under a causal mask a unit's first block is its longest; one that starts last ends alone."""
    sizes = (16384 // seqlen, 16, 16, seqlen, 1, 128, 132)
    (tiles, _, _), blocks = native.bwd_tiles(*sizes), seqlen // 128
    work = sum(blocks - block for _, block in tiles)
    assert makespan(tiles, blocks, 132) <= 1.04 * work / 132 + 1
    # Unit by unit it would be this much: what the order is there to save.
    if seqlen >= 2048:
        assert makespan(sorted(tiles), blocks, 132) >= 1.05 * work / 132
