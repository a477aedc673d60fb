"""Which calls go to the kernels of the key-value cache, and where these find their keys."""

import itertools
import random

import pytest
import torch

EXTREMES = [-(2**31), -1, 0, 3, 10, 11, 2**31 - 1]


def call_of(seqlen_q=1, seqlen_k=1000, heads=(32, 8), batch_size=2, **more) -> dict:
    return {
        "batch_size": batch_size,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "total_q": batch_size * seqlen_q,
        "total_k": batch_size * seqlen_k,
        "num_heads_q": heads[0],
        "num_heads_kv": heads[1],
        "k_strides": (seqlen_k * 256, 256, 128),
        **more,
    }


def packed_call(cu_seqlens_q, cu_seqlens_k, heads=(32, 8), **more):
    """The call and its index tensors, which must outlive it."""
    tensors = [torch.tensor(list(x), dtype=torch.int32) for x in (cu_seqlens_q, cu_seqlens_k)]
    call = call_of(0, 0, heads, len(tensors[0]) - 1)
    call["total_q"], call["total_k"] = int(tensors[0][-1]), int(tensors[1][-1])
    call["cu_seqlens_q"], call["cu_seqlens_k"] = (t.data_ptr() for t in tensors)
    call["k_strides"] = (0, 256, 128)
    return {**call, **more}, tensors


def is_short(native, call: dict, num_sms: int = 132) -> bool:
    rows = native.rows_of_cache_call(call, num_sms, False)
    assert rows in (0, native.kAllRows)
    return rows != 0


@pytest.mark.parametrize("batch_size", [1, 100])
@pytest.mark.parametrize("keys", [0, 1, 100000])
def test_one_tile_of_packed_rows_is_short(native, batch_size, keys):
    assert is_short(native, call_of(1, keys, batch_size=batch_size))
    assert is_short(native, call_of(4, keys, batch_size=batch_size))
    assert is_short(native, call_of(16, keys, (8, 8), batch_size))
    assert not is_short(native, call_of(128, keys, batch_size=batch_size))


def test_groups_share_keys_and_values(native):
    assert is_short(native, call_of(16, 4096, (32, 8), batch_size=32))
    assert not is_short(native, call_of(17, 4096, (32, 8), batch_size=32))
    assert not is_short(native, call_of(17, 4096, (32, 32), batch_size=32))


def test_idle_multiprocessors_share_many_keys(native):
    assert is_short(native, call_of(64, 4096, batch_size=1))
    assert not is_short(native, call_of(64, 4096, batch_size=1), num_sms=63)
    assert not is_short(native, call_of(64, 2048, batch_size=1))
    assert not is_short(native, call_of(17, 512, batch_size=1))
    assert not is_short(native, call_of(65, 100000, batch_size=1))
    assert not is_short(native, call_of(64, 4096, batch_size=1, window_left=100, window_right=0))


def test_the_mean_of_a_packed_batch_counts(native):
    call, _tensors = packed_call(range(101), range(0, 101000, 1000))
    assert is_short(native, call)
    call, _tensors = packed_call([0, 1, 4000], [0, 1, 4000])
    assert not is_short(native, call)


def shared_rows(native, lengths_q, lengths_k, heads=(32, 8)) -> int:
    bounds = ([0, *itertools.accumulate(lengths)] for lengths in (lengths_q, lengths_k))
    call, _tensors = packed_call(*bounds, heads)
    rows = native.rows_of_cache_call(call, 132, True)
    return -1 if rows == native.kAllRows else rows


def test_a_batch_that_may_hold_both_kinds_is_shared_out(native):
    steps = [1] * 300
    assert shared_rows(native, [4096, *steps], [4096, *steps]) == 16
    assert shared_rows(native, [700, *steps], [700, *steps]) == 4
    assert shared_rows(native, [700, *steps], [700, *steps], (8, 8)) == 16
    assert shared_rows(native, [8192, 1, 1], [8192, 5000, 5000]) == 4
    assert shared_rows(native, [8192, 1, 1], [8192, 5000, 5000], (64, 2)) == 2
    assert shared_rows(native, [8192, 1, 1], [8192, 5000, 5000], (128, 1)) == 0
    assert shared_rows(native, [8192, 1, 1], [8192, 5000, 5000], (8, 8)) == 0


def test_a_batch_of_one_kind_is_not(native):
    assert shared_rows(native, [1] * 300, [2000] * 300) == -1
    assert shared_rows(native, [4] * 32, [2000] * 32) == -1
    assert shared_rows(native, [1024] * 16, [1024] * 16) == 0
    assert shared_rows(native, [1024], [9000]) == 0


def test_each_row_of_a_shared_batch_belongs_to_one_kind_of_kernel(native):
    generator = random.Random(0)
    for _ in range(30):
        lengths = [generator.choice([0, 1, 3, 4, 5, 64, 65, 200]) for _ in range(6)]
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        total, bounds = int(cu_seqlens[-1]) + 9, cu_seqlens.tolist()
        call = call_of(0, 0, (8, 2), 6) | {"total_q": total, "most_rows": 4, "head_dim_v": 64}
        call |= {"cu_seqlens_q": cu_seqlens.data_ptr(), "num_entries": 1, "entry_rows": 64}
        shape = {"block_m": 16, "tile_keys": 16, "num_sms": 132, "max_cluster": 8}
        assert native.plan_splits(call, shape)[3] == 0  # no workspace
        found = []
        for _, head, first, count, row_q, _ in native.split_blocks(call, shape):
            assert first == 0
            found += [(head, row_q + row) for row in range(count // 4)]
        assert len(found) == 2 * sum(length for length in lengths if length <= 4)
        for of_short in (False, True):
            for tile in native.fwd_tiles_packed(
                bounds, bounds, total, total, 2, (-1, -1), 64, 64, 64, of_short, least_rows=5
            ):
                first = tile["row_q"] + 64 * tile["block"]
                last = min(first + 64, tile["row_q"] + tile["seqlen_q"])
                found += [(tile["head"], row) for row in range(first, last)]
        assert sorted(found) == list(itertools.product(range(2), range(total)))


@pytest.mark.parametrize(
    "more",
    [
        {"dropout_p": 0.1},
        {"attn_bias": 64},
        {"seqlen_k": 2**30},
        {"batch_size": 2**26},
        {"batch_size": 0},
    ],
    ids=str,
)
def test_what_the_cache_lacks_is_not(native, more):
    assert not is_short(native, call_of(**more))


def test_keys_of_a_dense_call(native):
    assert native.cache_call_keys(call_of(1, 50, batch_size=3)) == [
        (0, 50),
        (50 * 256, 50),
        (100 * 256, 50),
    ]


def test_keys_of_a_packed_call(native):
    call, _tensors = packed_call([0, 1, 2, 3], [0, 7, 7, 20])
    keys = native.cache_call_keys(call)
    assert keys[0] == (0, 7)
    assert keys[1][1] == 0
    assert keys[2] == (7 * 256, 13)


@pytest.mark.parametrize("total", [0, 10])
def test_hostile_bounds_lead_to_no_other_rows(native, total):
    """The same keys as the other kernels see."""
    for bounds in itertools.product(EXTREMES, EXTREMES):
        call, _tensors = packed_call([0, 1], bounds, total_k=total)
        ((offset, count),) = native.cache_call_keys(call)
        begin, end = native.packed_rows(list(bounds), 0, total)
        assert count == end - begin
        assert count == 0 or offset == begin * 256
