"""How attention to a cache is cut into blocks and splits: host code that decides all of it."""

import itertools
import random

import pytest
import torch
from reference import visible_keys

H200 = {"num_sms": 132, "ctas_per_sm": 2, "sets": 4, "more_sets": 8, "tile_keys": 16}
CLUSTERS = {**H200, "max_cluster": 8}
SMALL = {"num_sms": 84, "ctas_per_sm": 1, "sets": 4, "more_sets": 4, "tile_keys": 16}


def call_of(batch_size, keys, heads=(32, 8), head_dim=128, seqlen_q=1, **more) -> dict:
    return {
        "batch_size": batch_size,
        "seqlen_q": seqlen_q,
        "num_heads_q": heads[0],
        "num_heads_kv": heads[1],
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "num_entries": batch_size,
        "entry_rows": keys,
        **more,
    }


def test_prepared_divisors_divide(native):
    numbers = [0, 1, 2, 3, 15, 16, 17, 999, 2**16, 2**30, 2**31 - 2, 2**31 - 1]
    divisors = [1, 2, 3, 5, 7, 8, 10, 16, 96, 100, 128, 641, 4096, 65537, 2**30, 2**31 - 1]
    for number, divisor in itertools.product(numbers, divisors):
        assert native.divide(number, divisor) == number // divisor
    generator = random.Random(0)
    for _ in range(20000):
        number, divisor = generator.randrange(2**31), generator.randrange(1, 2**31)
        assert native.divide(number, divisor) == number // divisor
        assert native.divide(number, divisor % 1000 + 1) == number // (divisor % 1000 + 1)


@pytest.mark.parametrize("seqlens", [(1, 1), (5, 40), (40, 5), (7, 7), (3, 0)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (0, 0), (2, 4), (2**30, 2**30)])
def test_bands_are_the_masks_of_the_reference(native, seqlens, window):
    visible = visible_keys(*seqlens, window_size=window)
    for row in range(seqlens[0]):
        begin, end = native.band_keys(*seqlens, *window, row)
        keys = visible[row].nonzero().flatten().tolist()
        assert list(range(begin, end)) == keys


@pytest.mark.parametrize("keys", [(0, 0), (0, 1), (5, 5), (3, 17), (0, 1000), (977, 1003)])
@pytest.mark.parametrize("sets", [1, 3, 4, 8])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 16, 128])
def test_splits_share_the_tiles_with_keys(native, keys, sets, num_splits):
    covered = []
    for split in range(num_splits):
        begin, end = native.split_tiles(*keys, 16, sets, split, num_splits)
        covered += range(begin, end)
    wanted = [] if keys[0] >= keys[1] else list(range(keys[0] // 16, (keys[1] + 15) // 16))
    assert covered == wanted


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (3, 3), (40, 2)], ids=str)
def test_every_row_of_a_dense_call_has_one_block(native, block_m, heads):
    call = call_of(3, 100, heads, seqlen_q=9)
    group = heads[0] // heads[1]
    rows = []
    for batch, head, first, count, row_q, seqlen_k in native.split_blocks(
        call, {**H200, "block_m": block_m}
    ):
        assert (row_q, seqlen_k) == (9 * batch, 0)  # a cache without lengths is empty
        rows += [(batch, head, row) for row in range(first, first + count)]
    assert sorted(rows) == list(itertools.product(range(3), range(heads[1]), range(9 * group)))


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("more_rows", [0, 3])
def test_every_row_of_a_packed_call_has_one_block(native, block_m, more_rows):
    generator = random.Random(block_m + more_rows)
    for _ in range(30):
        lengths = [generator.choice([0, 1, 1, 2, 15, 16, 17, 100]) for _ in range(6)]
        keys = torch.tensor([generator.choice([0, 5, 64]) for _ in lengths], dtype=torch.int32)
        bounds = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        group = generator.choice([1, 3, 4])
        call = call_of(6, 64, (2 * group, 2), total_q=bounds[-1] + more_rows)
        call |= {"cu_seqlens_q": cu_seqlens.data_ptr(), "cache_seqlens": keys.data_ptr()}
        rows = []
        for batch, head, first, count, row_q, seqlen_k in native.split_blocks(
            call, {**H200, "block_m": block_m}
        ):
            assert row_q == bounds[batch]
            assert seqlen_k == (keys[batch] if batch < 6 else 0)  # the rest sees no keys
            rows += [(batch, head, row) for row in range(first, first + count)]
        counts = [*lengths, more_rows]
        wanted = [
            (batch, head, row)
            for batch, count in enumerate(counts)
            for head in range(2)
            for row in range(count * group)
        ]
        assert sorted(rows) == wanted


@pytest.mark.parametrize("card", [H200, CLUSTERS, SMALL], ids=["h200", "clusters", "small"])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 16, 64, 300])
@pytest.mark.parametrize("keys", [0, 1, 64, 512, 4096, 32768, 200000])
def test_splits_fill_a_card_and_no_more(native, card, batch_size, keys):
    row_tiles, num_splits, sets, workspace = native.plan_splits(call_of(batch_size, keys), card)
    assert row_tiles == batch_size
    steps = max(1, -(-keys // (16 * sets)))
    assert 1 <= num_splits <= min(128, steps)
    # Few splits that are clusters, of which the card has room for all at a time, need no memory
    ctas = batch_size * 8 * num_splits
    slots = card["num_sms"] * (1 if sets == card["more_sets"] else card["ctas_per_sm"])
    is_combined = num_splits > card.get("max_cluster", 1) or 4 * ctas > 3 * slots
    assert workspace == (
        num_splits * batch_size * 32 * 129 * 4 if num_splits > 1 and is_combined else 0
    )
    if batch_size >= 300:
        assert num_splits <= 8  # nine waves or more
    if batch_size == 1 and keys >= 4096:
        assert num_splits * 8 >= 0.48 * card["num_sms"]  # most of the card is at work


def test_asked_for_splits_are_given_as_far_as_there_are_steps(native):
    for asked, steps in itertools.product([1, 2, 5, 100, 10**6], [0, 1, 3, 50]):
        call = call_of(2, 64 * steps, num_splits=asked)
        _, num_splits, sets, _ = native.plan_splits(call, SMALL)
        assert (num_splits, sets) == (min(asked, max(1, steps), 128), 4)


def test_a_window_counts_only_the_keys_it_shows(native):
    call = call_of(1, 10**6, window_left=100, window_right=0)
    assert native.plan_splits(call, H200)[1] <= 2
    assert native.plan_splits({**call, "window_left": -1}, H200)[1] > 8
