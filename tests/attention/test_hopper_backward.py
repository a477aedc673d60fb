"""The backward pass where its grid matters: more tiles than run at a time, so few that groups are
split, and sums that take turns. Any GPU; the Hopper kernels have most to lose here."""

import pytest
import torch
from errors import assert_same_bits

from .comparison import check, make_inputs, random_dout, run_ours

pytestmark = pytest.mark.gpu

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
GRADIENTS = ("dq", "dk", "dv")


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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_small_grid_splits_its_groups(kernel, head_dim):
    check(kernel, make_inputs(CUDA_BF16, 1, 200, 300, (8, 1), head_dim), causal=True)


@pytest.mark.parametrize("option", ["softcap", "alibi_slopes"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_score_terms_over_several_tiles(kernel, head_dim, option):
    inputs = make_inputs(CUDA_BF16, 2, 300, 400, (4, 2), head_dim)
    value = 2.0 if option == "softcap" else torch.rand(2, 4, device="cuda")
    check(kernel, inputs, causal=True, **{option: value})


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (200, 0), (300, 100)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 12], ids=["fewer", "more"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_with_fewer_and_more_tiles_than_multiprocessors(
    kernel, batch_size, head_dim, window_size
):
    inputs = make_inputs(CUDA_BF16, batch_size, 1000, 1000, (4, 2), head_dim)
    options = {"deterministic": True, "window_size": window_size}
    dout = random_dout(inputs)
    first = run_ours(kernel, inputs, dout, **options)
    for _ in range(20):
        again = run_ours(kernel, inputs, dout, **options)
        for name in GRADIENTS:
            assert_same_bits(name, first[name], again[name])
