"""Packed sequences: each by itself, whatever lies around it."""

import pytest
import torch
from errors import assert_same_bits, assert_within, assert_zero

from .comparison import (
    check,
    cumulative,
    make_packed,
    random_dlse,
    random_dout,
    run_ours,
)

LENGTHS = [
    ([1], [1]),
    ([64], [1000]),
    ([5, 1, 17], [5, 1, 17]),
    ([63, 64, 65], [127, 128, 129]),
    ([0, 7, 0], [5, 9, 3]),  # sequences without queries
    ([5, 9, 3], [0, 7, 0]),  # sequences without keys
    ([130, 3, 70], [20, 90, 1]),  # more queries than keys
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_the_reference(kernel, place, lengths, causal):
    check(kernel, make_packed(place, *lengths), causal=causal)


def all_terms(place, lengths_q, lengths_k, heads=(6, 2)):
    inputs = make_packed(place, lengths_q, lengths_k, heads, 40, 72, more_rows=3)
    device = place["device"]
    inputs["alibi_slopes"] = torch.rand(len(lengths_q), heads[0], device=device)
    inputs["s_aux"] = torch.randn(heads[0], **place)
    inputs["attn_bias"] = torch.randn(heads[0], sum(lengths_q) + 3, max(lengths_k) + 2, **place)
    return inputs


def test_all_terms_together(kernel, place):
    inputs = all_terms(place, [65, 0, 20, 129], [70, 8, 3, 129])
    check(
        kernel,
        inputs,
        dsoftmax_lse=random_dlse(inputs),
        causal=True,
        window_size=(50, -1),
        softcap=20.0,
    )


def test_equals_dense_attention_of_each_sequence(kernel, place):
    lengths = [33, 1, 129]
    inputs = make_packed(place, lengths)
    dout = random_dout(inputs)
    packed = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        alone = run_ours(
            kernel,
            {name: inputs[name][None, rows] for name in ("q", "k", "v")},
            dout[None, rows],
            causal=True,
            deterministic=True,
        )
        # Two roundings, since work may be split over the threads in another way
        for name in ("out", "dq", "dk", "dv"):
            unit = torch.finfo(place["dtype"]).eps * max(1, alone[name].abs().max().item())
            assert_within(name, packed[name][rows], alone[name][0], 4 * unit)
        assert_within("lse", packed["softmax_lse"][:, rows], alone["softmax_lse"][0], 1e-5)
        begin += length


def test_neighbours_do_not_reach_a_sequence(kernel, bf16_place):
    inputs = make_packed(bf16_place, [40, 70, 65])
    dout = random_dout(inputs)
    plain = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    for name in ("q", "k", "v"):
        inputs[name][:40] = float("nan")
        inputs[name][110:] = float("nan")
    poisoned = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    for name in ("out", "dq", "dk", "dv"):
        assert_same_bits(name, poisoned[name][40:110], plain[name][40:110])


@pytest.mark.parametrize("more_rows", [1, 64, 300])
def test_rows_that_no_sequence_covers(kernel, place, more_rows):
    inputs = make_packed(place, [20, 65], [30, 64], more_rows=more_rows)
    ours = check(kernel, inputs, causal=True)
    assert_zero("out", ours["out"][85:])
    assert torch.isneginf(ours["softmax_lse"][:, 85:]).all()
    for name, covered in (("dq", 85), ("dk", 94), ("dv", 94)):
        assert_zero(name, ours[name][covered:])


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_no_sequences(kernel, place, rows):
    inputs = make_packed(place, [], [], more_rows=rows)
    inputs["s_aux"] = torch.randn(4, **place)
    ours = run_ours(kernel, inputs)
    for name in ("out", "dq", "dk", "dv", "ds_aux"):
        assert_zero(name, ours[name])
    assert ours["out"].shape == inputs["q"].shape
    assert torch.isneginf(ours["softmax_lse"]).all()


def test_many_short_sequences(kernel, bf16_place):
    check(kernel, make_packed(bf16_place, [3, 0, 1, 2] * 10, [2, 4, 0, 1] * 10), causal=True)


@pytest.mark.parametrize("lengths", ["int", "tensor", "too small", "too large"])
def test_no_result_depends_on_max_seqlen(kernel, bf16_place, lengths):
    inputs = make_packed(bf16_place, [20, 65], [30, 64])
    device = bf16_place["device"]
    max_seqlens = {
        "int": (65, 64),
        "tensor": (torch.tensor(65, device=device), torch.tensor(64, device=device)),
        "too small": (1, 0),
        "too large": (10**9, 10**9),
    }
    plain = run_ours(kernel, inputs)
    max_seqlen_q, max_seqlen_k = max_seqlens[lengths]
    out = kernel.flash_attn_varlen_func(
        **inputs, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k
    )
    assert_same_bits("out", out, plain["out"])


def test_packed_forms_are_the_plain_one(kernel, bf16_place):
    inputs = make_packed(bf16_place, [20, 65], heads=(4, 4))
    plain = run_ours(kernel, inputs, causal=True, deterministic=True)
    dout = torch.ones_like(plain["out"])
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    index = inputs["cu_seqlens_q"]
    qkv = torch.stack([q, k, v], dim=1).requires_grad_()
    out = kernel.flash_attn_varlen_qkvpacked_func(qkv, index, 65, causal=True, deterministic=True)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    assert_same_bits("out", out, plain["out"])
    for position, name in enumerate(("dq", "dk", "dv")):
        assert_same_bits(name, dqkv[:, position], plain[name])

    q = q.requires_grad_()
    kv = torch.stack([k, v], dim=1).requires_grad_()
    out = kernel.flash_attn_varlen_kvpacked_func(
        q, kv, index, index, 65, 65, causal=True, deterministic=True
    )
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    assert_same_bits("out", out, plain["out"])
    for name, gradient in (("dq", dq), ("dk", dkv[:, 0]), ("dv", dkv[:, 1])):
        assert_same_bits(name, gradient, plain[name])


@pytest.mark.gpu
def test_wrong_values_on_a_gpu_lead_nowhere_outside(kernel):
    device = torch.device("cuda")
    place = {"device": device, "dtype": torch.bfloat16}
    inputs = make_packed(place, [20, 65], [30, 64])
    for values in ([0, 20, 10**9], [-(10**9), 20, 85], [0, 85, 20], [10**9, -5, 3]):
        inputs["cu_seqlens_q"] = torch.tensor(values, dtype=torch.int32, device=device)
        inputs["cu_seqlens_k"] = torch.tensor(values, dtype=torch.int32, device=device)
        run_ours(kernel, inputs, causal=True)
        torch.cuda.synchronize()


def test_index_tensors_of_a_longer_tensor(kernel, bf16_place):
    # A slice that begins in the middle: contiguous, with an offset
    inputs = make_packed(bf16_place, [20, 65])
    plain = run_ours(kernel, inputs)
    longer = torch.cat([cumulative([7], bf16_place["device"]), inputs["cu_seqlens_q"]])
    inputs["cu_seqlens_q"] = inputs["cu_seqlens_k"] = longer[2:]
    assert_same_bits("out", run_ours(kernel, inputs)["out"], plain["out"])
