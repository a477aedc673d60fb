"""Calls on "meta" tensors, which end in the op's fake: the same shapes and the same refusals."""

import math

import pytest
import torch

from .comparison import make_inputs, make_packed
from .kvcache_comparison import make_case
from .test_refusals import dense, packed, refused

PLACE = {"device": torch.device("cpu"), "dtype": torch.bfloat16}


@pytest.fixture
def inputs():
    return make_inputs(PLACE, 2, 9, 12, (4, 2), 16)


@pytest.fixture
def packed_inputs():
    return make_packed(PLACE, [5, 4], [3, 9], (4, 2), 16)


def on_meta(inputs, **changes) -> dict:
    return {name: tensor.to("meta") for name, tensor in {**inputs, **changes}.items()}


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("q", (2, 9, 16), "q has shape (2, 9, 16), 3 dimensions; expected 4"),
        ("q", (2, 9, 3, 16), "q has 3 heads and k and v have 2"),
        ("k", (1, 12, 2, 16), "batch sizes 2, 1 and 2"),
        ("k", (2, 12, 2, 8), "q has head_dim 16 and k has head_dim 8"),
        ("v", (2, 7, 2, 16), "k has 12 rows and v has 7"),
        ("v", (2, 12, 1, 16), "k has 2 heads and v has 1"),
        ("v", (2, 12, 2, 513), "v has head_dim 513; allowed are 1 to 512"),
        ("alibi_slopes", (3,), "alibi_slopes has shape (3,)"),
        ("s_aux", (2,), "s_aux has shape (2,)"),
        ("attn_bias", (1, 3, 9, 12), "attn_bias has shape (1, 3, 9, 12)"),
        ("attn_bias", (1, 4, 9, 1), "attn_bias has shape (1, 4, 9, 1)"),
        ("attn_bias", (9, 12), "attn_bias has shape (9, 12)"),
    ],
)
def test_shapes_of_meta_tensors(kernel, inputs, name, shape, part):
    dtype = torch.float32 if name == "alibi_slopes" else torch.bfloat16
    refused(dense(kernel, on_meta(inputs, **{name: torch.empty(shape, dtype=dtype)})), part)


def test_dtypes_and_index_tensors_on_meta(kernel, inputs, packed_inputs):
    refused(dense(kernel, on_meta(inputs, k=inputs["k"].float())), "k is torch.float32")
    refused(dense(kernel, on_meta({n: x.long() for n, x in inputs.items()})), "torch.int64")
    wide = packed_inputs["cu_seqlens_k"].long()
    refused(
        packed(kernel, on_meta(packed_inputs, cu_seqlens_k=wide)), "cu_seqlens_k", "torch.int32"
    )


def message_of(call) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        {"softmax_scale": math.nan},
        {"softmax_scale": -1e300},
        {"window_size": (-2, 0)},
        {"window_size": (0, -7)},
        {"softcap": -1},
        {"softcap": 1e-60},
        {"softcap": math.inf},
        {"dropout_p": 1.0},
        {"dropout_p": -0.5},
        {"dropout_p": math.nan},
    ],
    ids=str,
)
def test_numbers(kernel, inputs, packed_inputs, option):
    """The same text as with values."""
    expected = message_of(dense(kernel, inputs, **option))
    assert message_of(dense(kernel, on_meta(inputs), **option)) == expected
    assert message_of(packed(kernel, on_meta(packed_inputs), **option)) == expected


@pytest.mark.parametrize(
    "option",
    [
        {"softmax_scale": math.inf},
        {"window_size": (0, -2)},
        {"softcap": -0.5},
        {"num_splits": -1},
        {"num_splits": 2**31},
        {"cache_seqlens": -1},
        {"cache_seqlens": 1000},
        {"cache_seqlens": 2**63 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("append", [0, 1, 3], ids="append {}".format)
@pytest.mark.parametrize("page_size", [None, 8])
def test_numbers_with_a_cache(kernel, option, append, page_size):
    case = make_case(PLACE, [20, 9], 2, append, heads=(4, 2), head_dim=16, page_size=page_size)
    expected = message_of(lambda: kernel.flash_attn_with_kvcache(**{**case, **option}))
    meta = {**on_meta(case), **option}
    assert message_of(lambda: kernel.flash_attn_with_kvcache(**meta)) == expected


@pytest.mark.parametrize("name", ["alibi_slopes", "s_aux", "attn_bias"])
def test_dtypes_of_score_terms_on_meta(kernel, inputs, name):
    shape = (1, 1, 9, 12) if name == "attn_bias" else (4,)
    term = torch.empty(shape, dtype=torch.float64)
    refused(dense(kernel, on_meta(inputs, **{name: term})), f"{name} has dtype torch.float64")


def test_good_meta_tensors(kernel, inputs, packed_inputs):
    extras = {"alibi_slopes": torch.empty(2, 4), "s_aux": torch.empty(4)}
    bias = torch.empty(1, 4, 1, 12)
    out = kernel.flash_attn_func(**on_meta(inputs, **extras, attn_bias=bias), causal=True)
    assert out.shape == inputs["q"].shape
    bias = torch.empty(4, 1, 20)
    meta = on_meta(packed_inputs, **extras, attn_bias=bias)
    out = kernel.flash_attn_varlen_func(**meta, max_seqlen_q=5, max_seqlen_k=9)
    assert out.shape == packed_inputs["q"].shape
