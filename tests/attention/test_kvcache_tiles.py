"""Caches that come in whole tiles: contiguous ones and pages of a multiple of 32 rows, which
kernels of their own read on Hopper. Unused rows and pages hold NaN."""

import pytest
import reference
import torch
from errors import LSE_TOLERANCE, assert_within, poisoned_memory, tolerance

from .kvcache_comparison import check, lengths_tensor, make_case

LATENT = (576, 512)


@pytest.mark.parametrize("page_size", [None, 16, 32, 64, 256])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2, 8, 9])
def test_splits_of_every_size_class(kernel, bf16_place, dims, page_size, num_splits):
    lengths = [1500, 0, 63, 640]
    case = make_case(bf16_place, lengths, 2, 1, (8, 2), *dims, page_size=page_size)
    check(kernel, case, {"num_splits": num_splits}, causal=True)


@pytest.mark.parametrize("page_size", [None, 32, 64])
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (100, 0)},
        {"window_size": (70, 5)},
        {"softcap": 5.0},
        {"softmax_scale": -0.3},
    ],
    ids=str,
)
def test_options(kernel, bf16_place, options, num_splits, page_size):
    leftpad = [70, 0, 129]
    case = make_case(
        bf16_place, [700, 64, 129], 3, heads=(8, 2), page_size=page_size, leftpad=leftpad
    )
    case["s_aux"] = torch.randn(8, device=bf16_place["device"])
    check(kernel, case, {"num_splits": num_splits}, **options)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("seqlen_q", [5, 16, 17, 40])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_more_rows_of_every_size_class(kernel, bf16_place, dims, seqlen_q, page_size, num_splits):
    """20 to 160 packed rows, in blocks of 64 or 128."""
    case = make_case(bf16_place, [700, 0, 63, 64], seqlen_q, 0, (8, 2), *dims, page_size=page_size)
    check(kernel, case, {"num_splits": num_splits}, causal=True)


def test_many_sequences(kernel, bf16_place):
    """More of them than a card has multiprocessors."""
    lengths = [(37 * i) % 200 for i in range(150)]
    check(kernel, make_case(bf16_place, lengths, heads=(4, 2), head_dim=128, page_size=64))


def latent_case(place, lengths, seqlen_q, num_heads_q, page_size) -> dict:
    """Values are the first columns of the rows of keys."""
    case = make_case(place, lengths, seqlen_q, 0, (num_heads_q, 1), *LATENT, page_size)
    return case | {"v_cache": case["k_cache"][..., : LATENT[1]]}


def check_latent(kernel, case, num_splits, **options) -> None:
    """As check(), but the caches are not copied, which would part keys and values."""
    with poisoned_memory():
        out, lse = kernel.flash_attn_with_kvcache(
            **case, **options, num_splits=num_splits, return_softmax_lse=True
        )
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in case.items()
    }
    expected = reference.attention_kvcache(**exact, **options)
    in_torch = reference.attention_kvcache(**case, **options)
    assert_within("out", out, expected[0], tolerance(expected[0], in_torch[0]))
    assert_within("softmax_lse", lse, expected[1], LSE_TOLERANCE)


@pytest.mark.parametrize("page_size", [None, 1, 64, 128])
@pytest.mark.parametrize("num_heads_q", [16, 64, 128])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_latent_attention(kernel, bf16_place, num_heads_q, num_splits, page_size):
    case = latent_case(bf16_place, [300, 0, 64, 1], 2, num_heads_q, page_size)
    check_latent(kernel, case, num_splits, causal=True)


@pytest.mark.parametrize(
    "options",
    [{"window_size": (100, 3)}, {"softcap": 5.0, "causal": True}, {"softmax_scale": -0.3}],
    ids=str,
)
def test_latent_attention_with_options(kernel, bf16_place, options):
    case = latent_case(bf16_place, [300, 20, 65], 3, 8, None)
    case |= {
        "cache_leftpad": lengths_tensor([70, 3, 0], bf16_place),
        "alibi_slopes": torch.rand(8, device=bf16_place["device"]),
        "s_aux": torch.randn(8, device=bf16_place["device"]),
    }
    check_latent(kernel, case, 2, **options)


def test_pages_of_one_table_behind_each_other(kernel, bf16_place):
    """More pages than the 32 that a warp looks up at a time, of two tiles each."""
    lengths = [9000, 4097]
    case = make_case(bf16_place, lengths, heads=(4, 1), head_dim=64, page_size=128)
    for num_splits in (1, 2):
        check(kernel, case, {"num_splits": num_splits})
