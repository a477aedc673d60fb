"""The backward pass where its grid matters: more tiles than run at a time, so few that groups are
split, and sums that take turns. Any GPU; the Hopper kernels have most to lose here."""

import pytest
import torch
from errors import assert_within, assert_zero, tolerance

from .comparison import (
    check,
    longest,
    make_inputs,
    make_packed,
    random_dout,
    run_formula,
    run_ours,
    with_gradients,
)

pytestmark = pytest.mark.gpu

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
GRADIENTS = ("dq", "dk", "dv")
SWITCH = "FLASH_ATTN_NORM_PORTABLE"


class BusyCard:
    """Products on a stream of its own, of changing size, so that the tiles of what runs beside them
    start late and in another order every time."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.a, self.b = (torch.randn(4096, 4096, **CUDA_BF16) for _ in range(2))
        torch.cuda.synchronize()
        self.count = 0

    def add_work(self) -> None:
        self.count += 1
        with torch.cuda.stream(self.stream):
            self.a[: 128 * (1 + self.count % 32)] @ self.b


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "head_dim_v"),
    [
        ((16, 16), 64, 64),
        ((16, 16), 128, 128),
        ((32, 8), 72, 72),
        ((8, 8), 256, 256),
        ((8, 8), 192, 128),
    ],
    ids=str,
)
def test_gradients_of_more_tiles_than_run_at_a_time(kernel, heads, head_dim, head_dim_v, causal):
    inputs = make_inputs(CUDA_BF16, 16, 520, 600, heads, head_dim, head_dim_v)
    check(kernel, inputs, causal=causal)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (8400, 40)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_a_long_sequence(kernel, head_dim, options):
    """The sums of dQ start from zeros there, not from what comes first."""
    check(kernel, make_inputs(CUDA_BF16, 1, 8300, 8500, (2, 1), head_dim), **options)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("seqlens", [(1430, 1300), (79, 1281), (81, 2000)], ids=str)
def test_gradients_of_steps_that_end_inside_a_block(kernel, seqlens, head_dim, options):
    """Without a mask and from 1025 keys on, steps of head dim 128 have 80 queries."""
    check(kernel, make_inputs(CUDA_BF16, 2, *seqlens, (4, 2), head_dim), **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4200, 0)}], ids=str)
def test_packed_gradients_of_long_sequences(kernel, options):
    lengths_q, lengths_k = [1500, 0, 81, 5000], [1700, 5, 4100, 12000]
    inputs = make_packed(CUDA_BF16, lengths_q, lengths_k, (4, 2), 128, more_rows=70)
    check(kernel, inputs, **options)


def assert_right_on_a_busy_card(kernel, inputs, repeats, **options) -> None:
    """The gradients are right on an idle card, and beside other work the same up to rounding."""
    dout = random_dout(inputs)
    alone = check(kernel, inputs, dout, **options)
    work = BusyCard()
    for _ in range(repeats):
        work.add_work()
        beside = run_ours(kernel, inputs, dout, **options)
        for name in GRADIENTS:
            step = torch.finfo(torch.bfloat16).eps * alone[name].abs().max().item()
            assert_within(name, beside[name], alone[name], 2 * step)


# (batch_size, seqlen_q, seqlen_k, heads, head_dim, head_dim_v): enough heads that Hopper's kernels
# round dQ themselves, more of them than have a place for their sums.
SHARED_SUMS = [
    (3, 300, 1100, 16, 128, 128),
    (4, 1100, 1030, 16, 96, 96),
    (6, 300, 400, 8, 256, 256),
    (40, 130, 70, 4, 192, 128),
    (300, 20, 40, 2, 200, 200),
]


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("sizes", SHARED_SUMS, ids=str)
def test_heads_share_the_place_of_their_sums(kernel, sizes, options):
    batch_size, seqlen_q, seqlen_k, heads, *head_dims = sizes
    inputs = make_inputs(CUDA_BF16, batch_size, seqlen_q, seqlen_k, (heads, heads), *head_dims)
    assert_right_on_a_busy_card(kernel, inputs, 20, **options)


# (batch_size, seqlen_q, seqlen_k, heads, head_dim, head_dim_v) and options: enough heads that
# Hopper's kernels zero sums of later ones.
SUMS_OF_LATER_HEADS = [
    ((3, 90, 2100, (8, 8), 256, 256), {"causal": True}),
    ((4, 500, 2200, (6, 6), 192, 128), {"window_size": (2100, 10)}),
    ((9, 300, 4200, (2, 2), 128, 128), {"window_size": (4150, 0)}),
    ((3, 300, 4200, (16, 16), 128, 128), {"causal": True}),
    ((3, 2500, 2500, (16, 16), 128, 128), {"causal": True, "softcap": 3.0}),
    ((16, 90, 1030, (4, 2), 128, 128), {}),
    ((16, 90, 1030, (4, 2), 128, 128), {"softcap": 2.0}),
]


@pytest.mark.parametrize(("sizes", "options"), SUMS_OF_LATER_HEADS, ids=str)
def test_heads_zero_the_sums_of_later_ones(kernel, sizes, options):
    assert_right_on_a_busy_card(kernel, make_inputs(CUDA_BF16, *sizes), 20, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_small_grid_splits_its_groups(kernel, head_dim):
    check(kernel, make_inputs(CUDA_BF16, 1, 200, 300, (8, 1), head_dim), causal=True)


@pytest.mark.parametrize("option", ["softcap", "alibi_slopes"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_score_terms_over_several_tiles(kernel, head_dim, option):
    inputs = make_inputs(CUDA_BF16, 2, 300, 400, (4, 2), head_dim)
    value = 2.0 if option == "softcap" else torch.rand(2, 4, device="cuda")
    check(kernel, inputs, causal=True, **{option: value})


@pytest.mark.parametrize("card", ["idle", "busy"])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (200, 0), (300, 100)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 12], ids=["fewer", "more"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_with_fewer_and_more_tiles_than_multiprocessors(
    kernel, batch_size, head_dim, window_size, card
):
    inputs = make_inputs(CUDA_BF16, batch_size, 1000, 1000, (4, 2), head_dim)
    assert_repeats(kernel, inputs, card, window_size=window_size)


@pytest.mark.parametrize("card", ["idle", "busy"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_packed(kernel, head_dim, card):
    lengths = [700, 0, 1, 129, 1500, 64, 333]
    inputs = make_packed(CUDA_BF16, lengths, heads=(8, 2), head_dim=head_dim, more_rows=70)
    assert_repeats(kernel, inputs, card, causal=True)


@pytest.mark.parametrize("card", ["idle", "busy"])
def test_deterministic_where_steps_end_inside_a_block(kernel, card):
    assert_repeats(kernel, make_inputs(CUDA_BF16, 2, 1430, 1300, (4, 2), 128), card)


@pytest.mark.parametrize("head_dims", [(192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (200, 30)}, {"softcap": 2.0}], ids=str
)
def test_deterministic_gradients_of_large_head_dims(kernel, head_dims, options):
    check(
        kernel,
        make_inputs(CUDA_BF16, 6, 1100, 900, (6, 2), *head_dims),
        deterministic=True,
        **options,
    )


def assert_repeats(kernel, inputs, card, repeats=200, **options) -> None:
    """Deterministic gradients are the same bits in every repeat."""
    dout = random_dout(inputs)
    first = run_ours(kernel, inputs, dout, deterministic=True, **options)
    work = BusyCard() if card == "busy" else None
    same = torch.ones((), dtype=torch.bool, device="cuda")
    leaves = with_gradients(inputs)
    if "cu_seqlens_q" in inputs:
        longest_q, longest_k = (longest(inputs[f"cu_seqlens_{x}"]) for x in "qk")
        options.update(max_seqlen_q=longest_q, max_seqlen_k=longest_k)
        function = kernel.flash_attn_varlen_func
    else:
        function = kernel.flash_attn_func
    out = function(**leaves, deterministic=True, **options)
    for _ in range(repeats):
        if work is not None:
            work.add_work()
        again = torch.autograd.grad(out, [leaves[n] for n in "qkv"], dout, retain_graph=True)
        for name, gradient in zip(GRADIENTS, again, strict=True):
            same &= (gradient == first[name]).all()  # no copy to the host: calls follow at once
    assert same.item()


@pytest.mark.parametrize("batch_size", [1, 40], ids=["fewer", "more"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_busy_card_with_fewer_and_more_tiles_than_multiprocessors(kernel, batch_size, head_dim):
    """Whoever comes first to a query block, the sums are the same up to rounding."""
    inputs = make_inputs(CUDA_BF16, batch_size, 500, 500, (4, 2), head_dim)
    assert_right_on_a_busy_card(kernel, inputs, 50, causal=True)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (150, 20)}], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_packed_gradients_under_a_mask(kernel, head_dims, options):
    lengths_q, lengths_k = [700, 0, 1, 129, 1500, 64, 333], [700, 5, 0, 400, 1100, 64, 1]
    inputs = make_packed(CUDA_BF16, lengths_q, lengths_k, (8, 2), *head_dims, more_rows=70)
    check(kernel, inputs, **options)


@pytest.mark.parametrize("seqlens", [(700, 300), (64, 1000), (1, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_query_blocks_that_no_key_block_meets(kernel, head_dim, seqlens):
    """Their dq is zero, and nothing of the workspace, which holds NaN, gets there."""
    inputs = make_inputs(CUDA_BF16, 2, *seqlens, (4, 2), head_dim)
    check(kernel, inputs, window_size=(10, 0))
    ours = check(kernel, inputs, causal=True)
    assert_zero("dq", ours["dq"][:, : max(0, seqlens[0] - seqlens[1])])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)
def test_agrees_with_the_portable_kernels(kernel, monkeypatch, head_dims, causal):
    """Both gradients are within the derived tolerance of the reference, so within its double of
    each other; and on capability 9.0 they are not the same kernels'."""
    inputs = make_inputs(CUDA_BF16, 2, 1100, 900, (6, 2), *head_dims)
    dout = random_dout(inputs)
    monkeypatch.delenv(SWITCH, raising=False)
    own = check(kernel, inputs, dout, causal=causal)
    monkeypatch.setenv(SWITCH, "1")
    portable = check(kernel, inputs, dout, causal=causal)
    exact = run_formula(inputs, dout, dtype=torch.float64, causal=causal)
    in_torch = run_formula(inputs, dout, causal=causal)
    for name in GRADIENTS:
        allowed = 2 * tolerance(exact[name], in_torch[name])
        assert_within(name, own[name], portable[name], allowed)
    same = torch.equal(own["dk"], portable["dk"])
    assert same == (torch.cuda.get_device_capability() != (9, 0))
