"""The Hopper kernels' host logic: which tile comes when, where a tile's bytes lie, and what the
copy engine is told of a tensor."""

import itertools
import random

import pytest
from reference import visible_keys

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (20, 0), (3, 40), (5, -1), (2**40, 1)]
LAYOUTS = ["128x64", "192x64", "128x96", "128x128", "112x192", "80x256"]


def check_tile(tile: dict, seqlens: tuple, window: tuple, block_m: int, block_n: int) -> None:
    """A tile meets all key blocks that its rows see, and none of its blocks is wrongly called
    unmasked; left and right give every row's keys."""
    seqlen_q, seqlen_k = seqlens
    assert (tile["seqlen_q"], tile["seqlen_k"]) == seqlens
    first = tile["block"] * block_m
    rows = slice(first, min(first + block_m, seqlen_q))
    visible = visible_keys(seqlen_q, seqlen_k, window_size=window)
    begin, end, full_begin, full_end = tile["blocks"]
    for n in range((seqlen_k + block_n - 1) // block_n):
        seen = visible[rows, n * block_n : (n + 1) * block_n]
        assert not seen.any() or begin <= n < end
        if begin <= n < end and full_begin <= n < full_end:
            assert seen.all()
            assert seen.shape[1] == block_n
    for row in range(rows.start, rows.stop):
        keys = range(max(row + tile["left"], 0), min(row + tile["right"], seqlen_k))
        assert visible[row].nonzero().flatten().tolist() == list(keys)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("seqlens", [(1, 1), (100, 100), (130, 40), (40, 130), (64, 0)], ids=str)
def test_dense_tiles_cover_every_row_once(native, seqlens, window):
    tiles = native.fwd_tiles_dense(2, *seqlens, 3, window, 64, 16)
    blocks = range((seqlens[0] + 63) // 64)
    found = [(tile["sequence"], tile["head"], tile["block"]) for tile in tiles]
    assert sorted(found) == list(itertools.product(range(2), range(3), blocks))
    for tile in tiles:
        assert (tile["row_q"], tile["row_k"]) == (0, 0)
        check_tile(tile, seqlens, window, 64, 16)


def test_longest_causal_tiles_come_first(native):
    """Blocks descend over all heads whose keys and values stay in the L2 together."""
    tiles = native.fwd_tiles_dense(1, 1000, 1000, 2, (-1, 0), 128, 128)
    assert [tile["blocks"][1] for tile in tiles] == [n for n in range(8, 0, -1) for _ in range(2)]
    assert [tile["head"] for tile in tiles] == [0, 1] * 8


def test_heads_whose_keys_do_not_fit_the_l2_come_one_after_the_other(native):
    tiles = native.fwd_tiles_dense(1, 128, 2**20, 5, (-1, 0), 64, 128)
    assert [(tile["head"], tile["block"]) for tile in tiles] == [
        (head, block) for head in range(5) for block in (1, 0)
    ]


def test_without_a_causal_mask_heads_come_one_after_the_other(native):
    tiles = native.fwd_tiles_dense(1, 1000, 1000, 2, (-1, -1), 128, 128)
    assert [tile["head"] for tile in tiles] == [0] * 8 + [1] * 8


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 4)], ids=str)
@pytest.mark.parametrize("more_rows", [0, 1, 100])
def test_packed_tiles_cover_every_row_once(native, window, more_rows):
    generator = random.Random(more_rows)
    for _ in range(15):
        lengths_q = [generator.choice([0, 1, 31, 32, 33, 70]) for _ in range(6)]
        lengths_k = [generator.choice([0, 1, 15, 16, 17, 50]) for _ in range(6)]
        cu_q = [0, *itertools.accumulate(lengths_q)]
        cu_k = [0, *itertools.accumulate(lengths_k)]
        total_q, total_k = cu_q[-1] + more_rows, cu_k[-1] + more_rows
        tiles = native.fwd_tiles_packed(cu_q, cu_k, total_q, total_k, 2, window, 32, 16)
        rows = {head: [] for head in range(2)}
        for tile in tiles:
            first = tile["row_q"] + tile["block"] * 32
            count = min(32, tile["seqlen_q"] - tile["block"] * 32)
            rows[tile["head"]] += range(first, first + count)
            if tile["sequence"] == 6:  # rows that no sequence covers see nothing
                assert tile["blocks"][0] == tile["blocks"][1]
            else:
                sequence = tile["sequence"]
                assert tile["row_q"] == cu_q[sequence]
                assert tile["row_k"] == cu_k[sequence]
                check_tile(tile, (lengths_q[sequence], lengths_k[sequence]), window, 32, 16)
        for found in rows.values():
            assert sorted(found) == list(range(total_q))


def test_a_packed_sequence_is_in_one_of_two_lists(native):
    """Short ones, by their rows and keys, in tiles of their own; every row in one tile."""
    rows, keys = native.kShortRows, native.kShortKeys
    lengths_q = [rows, 1, rows + 1, 0, 7, 500, rows, 3]
    lengths_k = [keys, 0, keys, 9, keys + 1, 500, 20, 3]
    cu_q = [0, *itertools.accumulate(lengths_q)]
    cu_k = [0, *itertools.accumulate(lengths_k)]

    def sequences(of_short: bool, total_q: int) -> list:
        block_m = rows if of_short else 2 * rows
        tiles = native.fwd_tiles_packed(
            cu_q, cu_k, total_q, cu_k[-1], 1, (-1, -1), block_m, 16, rows, of_short
        )
        found = [(tile["sequence"], tile["block"]) for tile in tiles]
        assert len(set(found)) == len(found)
        assert all(tile["row_q"] == [*cu_q, 0][tile["sequence"]] for tile in tiles)
        return sorted(sequence for sequence, _ in found)

    assert sequences(True, cu_q[-1]) == [0, 1, 6, 7]
    assert sequences(False, cu_q[-1]) == [2, 4, 5, 5, 5, 5]
    # The rows behind the last sequence are one more, without keys.
    assert sequences(True, cu_q[-1] + rows) == [0, 1, 6, 7, 8]
    assert sequences(False, cu_q[-1] + 2 * rows + 1) == [2, 4, 5, 5, 5, 5, 8, 8]


def test_wild_cu_seqlens_stay_inside_the_tensor(native):
    cu_seqlens = [0, 50, -7, 2**31 - 1, 20]
    for tile in native.fwd_tiles_packed(cu_seqlens, cu_seqlens, 100, 90, 1, (-1, 0), 32, 16):
        assert tile["row_q"] >= 0
        assert tile["row_q"] + tile["seqlen_q"] <= 100
        assert tile["row_k"] >= 0
        assert tile["row_k"] + tile["seqlen_k"] <= 90


@pytest.mark.parametrize("name", LAYOUTS)
def test_tile_is_a_permutation_of_its_bytes(native, name):
    layout = getattr(native, f"tile_layout_{name}")()
    offsets = [offset for row in layout["unit_offsets"] for offset in row]
    assert sorted(offsets) == list(range(0, layout["bytes"], 16))


@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_rows_of_one_unit_lie_in_different_banks(native, name):
    """128 bytes of banks, or half of them twice where a row has 64 bytes."""
    layout = getattr(native, f"tile_layout_{name}")()
    different = layout["row_bytes"] // 16
    for first in range(0, len(layout["unit_offsets"]), 8):
        rows = layout["unit_offsets"][first : first + 8]
        for unit in range(len(rows[0])):
            assert len({row[unit] % 128 for row in rows}) == 8 or different < 8
            assert len({row[unit] % 128 for row in rows}) >= different


@pytest.mark.parametrize("name", LAYOUTS)
def test_swizzle_is_the_copy_engines(native, name):
    """Address bits 4-6 XOR bits 7-9 over 128 bytes, bits 4-5 XOR bits 7-8 over 64 (CUDA
    programming guide, swizzle modes)."""
    layout = getattr(native, f"tile_layout_{name}")()
    units_per_row = layout["row_bytes"] // 16
    for row, offsets in enumerate(layout["unit_offsets"]):
        for unit, offset in enumerate(offsets):
            chunk, inner = divmod(unit, units_per_row)
            plain = row * layout["row_bytes"] + inner * 16
            swizzled = plain ^ ((plain >> 7) & (units_per_row - 1)) << 4
            assert offset == chunk * layout["chunk_bytes"] + swizzled


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_a_product_start_at_their_columns_and_rows(native, name):
    layout = getattr(native, f"tile_layout_{name}")()
    offsets = layout["unit_offsets"]
    # Row 0 is not permuted: a step starts where its first unit lies.
    assert layout["column_steps"] == [offsets[0][2 * k] for k in range(len(layout["column_steps"]))]
    assert layout["row_steps"] == [offsets[16 * k][0] for k in range(len(layout["row_steps"]))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_descriptors(native, name):
    """Fields of PTX's matrix descriptor: address, leading and stride offsets in units of 16 bytes,
    swizzle mode."""
    layout = getattr(native, f"tile_layout_{name}")()
    for which, leading in (("column", 16), ("row", layout["chunk_bytes"])):
        bits = layout[f"{which}_descriptor"]
        assert bits & 0x3FFF == 0x12400 >> 4
        assert (bits >> 16) & 0x3FFF == leading // 16
        assert (bits >> 32) & 0x3FFF == 8 * layout["row_bytes"] // 16
        assert bits >> 62 == (1 if layout["row_bytes"] == 128 else 2)


def test_tensor_map_of_a_view(native):
    shape = (2, 100, 3, 80)  # batch_size, rows, heads, head_dim
    strides = (64000, 640, 160)  # batch, row, head
    assert native.tensor_map_shape_96(shape, strides, 128) == {
        "sizes": [80, 100, 3, 2],
        "stride_bytes": [1280, 320, 128000],
        "box": (32, 128),
        "swizzle_bytes": 64,
    }
    assert native.tensor_map_shape_256(shape, strides, 80)["box"] == (64, 80)


def test_tensor_map_of_sizes_one_and_zero(native):
    """No size may be 0, and the stride of a size of 1 need not be legal."""
    shape = native.tensor_map_shape_64((1, 0, 1, 64), (7, 0, 3), 128)
    assert shape["sizes"] == [64, 1, 1, 1]
    assert shape["stride_bytes"] == [16, 16, 16]


@pytest.mark.parametrize(
    ("shape", "strides", "data", "possible"),
    [
        ((2, 100, 3, 64), (19200, 192, 64), 4096, True),
        ((2, 100, 3, 64), (19200, 192, 64), 4104, False),  # base of 8 bytes
        ((2, 100, 3, 64), (19200, 196, 64), 4096, False),  # row stride of 8 bytes
        ((2, 100, 3, 64), (19200, 192, 0), 4096, True),  # a head that is expanded
        ((2, 100, 3, 64), (0, 0, 0), 4096, True),
        ((2, 100, 3, 64), (-19200, 192, 64), 4096, False),
        ((1, 100, 1, 64), (3, 64, 1), 4096, True),
        ((2, 100, 3, 64), (2**39, 192, 64), 4096, False),
        ((1, 2**31, 1, 64), (0, 64, 0), 4096, False),
        ((1, 100, 1, 60), (0, 64, 0), 4096, False),
    ],
    ids=str,
)
def test_which_tensors_a_map_can_describe(native, shape, strides, data, possible):
    assert native.can_map_tensor(shape, strides, data) is possible
