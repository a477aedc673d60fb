"""Packed sequences of which only the first keys are used: as if the others were not there, whatever
they hold."""

import math

import pytest
import torch
from errors import assert_same_bits, assert_within, assert_zero
from torch._subclasses.fake_tensor import FakeTensorMode

from .comparison import (
    allowed_errors,
    cumulative,
    make_packed,
    random_dlse,
    random_dout,
    run_formula,
    run_ours,
    with_gradients,
)
from .kvcache_comparison import lengths_tensor, random_pages
from .test_refusals import refused

# queries, keys, used keys
LENGTHS = [
    ([5], [9], [4]),
    ([64, 1, 130], [200, 70, 129], [129, 70, 1]),
    ([63, 0, 20], [100, 40, 65], [0, 17, 64]),  # none used; no queries
    ([1, 1, 1, 1], [300, 5, 1, 64], [257, 0, 1, 64]),  # a step of generation
]


def used_rows(lengths_k, used) -> torch.Tensor:
    begins = [sum(lengths_k[:i]) for i in range(len(used))]
    return torch.cat([torch.arange(b, b + u) for b, u in zip(begins, used, strict=True)])


def make_case(place, lengths, **options) -> tuple[dict, dict]:
    """Arguments with keys that are not used, NaN all, and those without these keys."""
    lengths_q, lengths_k, used = lengths
    inputs = make_packed(place, lengths_q, lengths_k, **options)
    rows = used_rows(lengths_k, used).to(place["device"])
    compact = {**inputs, "cu_seqlens_k": cumulative(used, place["device"])}
    for name in ("k", "v"):
        compact[name] = inputs[name][rows]
        inputs[name] = torch.full_like(inputs[name], math.nan)
        inputs[name][rows] = compact[name]
    inputs["seqused_k"] = lengths_tensor(used, place)
    return inputs, compact


def check(kernel, inputs, compact, **options) -> None:
    """Ours with the unused keys against the reference without them."""
    dout = random_dout(inputs)
    lse = {"dsoftmax_lse": random_dlse(inputs)}
    ours = run_ours(kernel, inputs, dout, **lse, **options)
    expected = run_formula(compact, dout, **lse, dtype=torch.float64, **options)
    allowed = allowed_errors(compact, expected, dout=dout, **lse, **options)
    lengths_k, used = inputs["cu_seqlens_k"].diff().tolist(), inputs["seqused_k"].tolist()
    rows = used_rows(lengths_k, used).to(inputs["q"].device)
    others = torch.ones(inputs["k"].shape[0], dtype=torch.bool, device=rows.device)
    others[rows] = False
    for name in ("dk", "dv"):
        assert_zero(name, ours[name][others])
        ours[name] = ours[name][rows]
    for name, value in expected.items():
        assert_within(name, ours[name], value, allowed[name])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_the_reference_without_them(kernel, place, lengths, causal):
    check(kernel, *make_case(place, lengths), causal=causal)


def test_all_terms_together(kernel, place):
    lengths = ([65, 0, 20, 129], [170, 8, 30, 129], [70, 8, 3, 128])
    inputs, compact = make_case(place, lengths, heads=(6, 2), head_dim=40, head_dim_v=72)
    for case in (inputs, compact):
        generator = torch.Generator(place["device"]).manual_seed(1)
        draw = {"generator": generator, "device": place["device"]}
        case["alibi_slopes"] = torch.rand(4, 6, **draw)
        case["s_aux"] = torch.randn(6, **draw)
        case["attn_bias"] = torch.randn(6, 214, 170, **draw).to(place["dtype"])
    check(kernel, inputs, compact, causal=True, window_size=(50, -1), softcap=20.0)


def test_all_of_them_used(kernel, bf16_place):
    inputs = make_packed(bf16_place, [65, 20], [129, 64])
    dout = random_dout(inputs)
    expected = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    inputs["seqused_k"] = lengths_tensor([129, 64], bf16_place)
    ours = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    for name, value in expected.items():
        unit = torch.finfo(torch.bfloat16).eps * max(1, value.abs().max().item())
        assert_within(name, ours[name], value, 4 * unit)


def test_dropout_gives_gradients_of_its_own_mask(kernel, bf16_place):
    """Values of ones: the output is what dropping has left of each row's weights, and dv is what
    it has left of each key's."""
    inputs, _ = make_case(bf16_place, ([200, 70], [300, 90], [257, 33]))
    inputs["v"][:257], inputs["v"][300:333] = 1, 1
    leaves = with_gradients(inputs)
    out = kernel.flash_attn_varlen_func(**leaves, max_seqlen_q=200, max_seqlen_k=300, dropout_p=0.5)
    out[..., 0].float().sum().backward()
    kept = out[..., 0].float().sum()
    dv = leaves["v"].grad[..., 0].float()
    assert_zero("dv", dv[257:300])
    # Each of the two sums rounds numbers of bfloat16.
    torch.testing.assert_close(dv.sum(), kept, rtol=2**-7, atol=0)
    assert 0.8 < kept / (270 * 4) < 1.2


def test_pages(kernel, bf16_place):
    """cu_seqlens_k may be None: nothing else is asked of it."""
    inputs = make_packed(bf16_place, [3, 5], [17, 9])
    table = random_pages([20, 16], 8, bf16_place)
    pages = {name: torch.randn(7, 8, 2, 64, **bf16_place) for name in ("k", "v")}
    paged = {**inputs, **pages, "block_table": table, "max_seqlen_q": 5, "max_seqlen_k": 17}
    expected = kernel.flash_attn_varlen_func(**paged, causal=True)
    used = lengths_tensor([17, 9], bf16_place)
    for cu_seqlens_k in (None, cumulative([20, 16], bf16_place["device"])):
        paged["cu_seqlens_k"] = cu_seqlens_k
        out = kernel.flash_attn_varlen_func(**paged, causal=True, seqused_k=used)
        assert_same_bits("out", out, expected)
    paged["cu_seqlens_k"] = None
    refused(lambda: kernel.flash_attn_varlen_func(**paged), "cu_seqlens_k is None")


def test_compiled(kernel, bf16_place):
    inputs, _ = make_case(bf16_place, ([64, 1], [200, 70], [129, 70]))
    dout = random_dout(inputs)

    def run(function):
        leaves = with_gradients(inputs)
        out = function(leaves)
        return out, *torch.autograd.grad(out, [leaves[n] for n in "qkv"], dout)

    def forward(leaves):
        return kernel.flash_attn_varlen_func(
            **leaves, max_seqlen_q=64, max_seqlen_k=200, causal=True, deterministic=True
        )

    torch._dynamo.reset()
    compiled = run(torch.compile(forward, fullgraph=True, backend="aot_eager"))
    for name, ours, eager in zip(("out", "dq", "dk", "dv"), compiled, run(forward), strict=True):
        assert_same_bits(name, ours, eager)


def test_refusals(kernel, bf16_place):
    inputs, _ = make_case(bf16_place, ([5, 4], [9, 8], [4, 8]))
    device = bf16_place["device"]

    def call(**changes):
        lengths = {"max_seqlen_q": 5, "max_seqlen_k": 9}
        return lambda: kernel.flash_attn_varlen_func(**{**inputs, **lengths, **changes})

    good = inputs["seqused_k"]
    refused(call(seqused_k=good.long()), "seqused_k has dtype torch.int64", "torch.int32")
    refused(call(seqused_k=good[:1]), "seqused_k has shape (1,)", "(batch_size,) = (2,)")
    refused(call(seqused_k=True), "seqused_k is True", "torch.Tensor")
    refused(call(seqused_k=good.to("meta")), "seqused_k is on meta", "one device")
    refused(call(cu_seqlens_k=good[:1]), "cu_seqlens_k")
    refused(call(cu_seqlens_k=inputs["cu_seqlens_k"].long()), "cu_seqlens_k", "torch.int64")
    refused(call(cu_seqlens_k=None), "cu_seqlens_k is None")
    slopes = torch.zeros(3, 4, device=device)
    refused(call(alibi_slopes=slopes), "alibi_slopes has shape (3, 4)", "(batch_size, num_heads_q)")
    refused(call(alibi_slopes=True), "alibi_slopes is True")
    if device.type == "cpu":
        refused(call(cu_seqlens_k=inputs["cu_seqlens_k"].flip(0)), "cu_seqlens_k")
    kernel.check_inputs(device.type == "cuda")
    try:
        for wrong in (-1, 10):
            used = lengths_tensor([wrong, 8], bf16_place)
            said = f"seqused_k[0] is {wrong}", "in cu_seqlens_k, 9"
            refused(call(seqused_k=used), *said)
    finally:
        kernel.check_inputs(False)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_index_that_a_refusal_of_lengths_names(kernel, bf16_place, name):
    inputs, _ = make_case(bf16_place, ([5, 4], [9, 8], [4, 8]))
    inputs.update(max_seqlen_q=5, max_seqlen_k=9)
    inputs[name] = lengths_tensor([0, 5, 4], bf16_place)
    kernel.check_inputs(bf16_place["device"].type == "cuda")
    try:
        said = f"{name} decreases at index 2: 5, 4"
        refused(lambda: kernel.flash_attn_varlen_func(**inputs), said)
    finally:
        kernel.check_inputs(False)


def test_fake_tensors(kernel):
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    inputs, _ = make_case(place, ([5, 4], [9, 8], [4, 8]))
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
        out = kernel.flash_attn_varlen_func(**fakes, max_seqlen_q=5, max_seqlen_k=9)
    assert out.shape == inputs["q"].shape


def test_meta_tensors(kernel, bf16_place):
    inputs, _ = make_case(bf16_place, ([5, 4], [9, 8], [4, 8]))
    meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    out = kernel.flash_attn_varlen_func(**meta, max_seqlen_q=5, max_seqlen_k=9)
    assert out.shape == inputs["q"].shape
    meta["seqused_k"] = meta["seqused_k"][:1]
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    refused(lambda: kernel.flash_attn_varlen_func(**meta, **lengths), "seqused_k has shape (1,)")


def test_lengths_that_vmap_maps(kernel):
    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    inputs, _ = make_case(place, ([5, 4], [9, 8], [9, 8]))
    del inputs["seqused_k"]
    lengths = torch.tensor([[4, 8], [9, 0], [1, 1]], dtype=torch.int32)

    def attention(used):
        return kernel.flash_attn_varlen_func(
            **inputs, max_seqlen_q=5, max_seqlen_k=9, seqused_k=used
        )

    outs = torch.func.vmap(attention)(lengths)
    for out, used in zip(outs, lengths, strict=True):
        assert_same_bits("out", out, attention(used))
    for wrong in (-1, 10):
        lengths[1, 0] = wrong
        refused(lambda: torch.func.vmap(attention)(lengths), "seqused_k", "vmap", "between 0 and")


@pytest.mark.gpu
def test_values_on_a_gpu_are_clamped(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_packed(place, [5, 4], [9, 8])
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 9}
    for wrong, right in (([2**31 - 1, 8], [9, 8]), ([-7, 8], [0, 8])):
        outs = [
            kernel.flash_attn_varlen_func(
                **inputs, **lengths, seqused_k=lengths_tensor(used, place)
            )
            for used in (wrong, right)
        ]
        assert_same_bits("out", *outs)
