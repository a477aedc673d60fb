"""Views, offsets and layouts: the values count, not where they lie."""

import pytest
import torch
from errors import assert_same_bits, surrounded_by_nan

from .comparison import check, make_inputs, make_packed, random_dout, run_ours


def run_both(kernel, inputs, strided, dout):
    contiguous = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    ours = run_ours(kernel, strided, dout, causal=True, deterministic=True)
    for name in contiguous:
        assert_same_bits(name, ours[name], contiguous[name])


@pytest.mark.parametrize("head_dim", [64, 46, 256])
def test_slices_of_a_fused_projection(kernel, place, head_dim):
    fused = torch.randn(2, 130, 3, 4, head_dim, **place)
    strided = dict(zip("qkv", fused.unbind(2), strict=True))
    inputs = {name: tensor.contiguous() for name, tensor in strided.items()}
    run_both(kernel, inputs, strided, random_dout(inputs))


def test_slices_of_a_head_major_buffer(kernel, place):
    fused = torch.randn(2, 8, 130, 64, **place)  # q, k and v heads in one buffer
    rows_first = fused.transpose(1, 2)
    strided = {"q": rows_first[:, :, :4], "k": rows_first[:, :, 4:6], "v": rows_first[:, :, 6:]}
    inputs = {name: tensor.contiguous() for name, tensor in strided.items()}
    run_both(kernel, inputs, strided, random_dout(inputs))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_last_dimension_without_unit_stride(kernel, place, packed):
    if packed:
        inputs = make_packed(place, [33, 20], heads=(4, 2))
    else:
        inputs = make_inputs(place, 2, 33, 33, (4, 2))
    strided = dict(inputs)
    for name in ("q", "k", "v"):
        tensor = inputs[name]
        rows = tensor.dim() - 3
        strided[name] = tensor.movedim(rows, -1).contiguous().movedim(-1, rows)
        assert strided[name].stride(-1) != 1
    run_both(kernel, inputs, strided, random_dout(inputs))


def test_every_second_element(kernel, place):
    inputs = make_inputs(place, 1, 33, 33)
    strided = {name: tensor.repeat_interleave(2, -1)[..., ::2] for name, tensor in inputs.items()}
    run_both(kernel, inputs, strided, random_dout(inputs))


@pytest.mark.parametrize("offset", [1, 3, 4])
def test_misaligned_storage(kernel, place, offset):
    inputs = make_inputs(place, 1, 33, 70)
    strided = {}
    for name, tensor in inputs.items():
        memory = torch.empty(tensor.numel() + offset, **place)
        strided[name] = memory[offset:].view(tensor.shape)
        strided[name].copy_(tensor)
    run_both(kernel, inputs, strided, random_dout(inputs))


@pytest.mark.parametrize("expanded_dim", [0, 1, 2], ids=["batch", "rows", "heads"])
@pytest.mark.parametrize("seqlens", [(33, 70), (130, 140)], ids=["short", "long"])
def test_expanded_keys(kernel, place, seqlens, expanded_dim):
    seqlen_q, seqlen_k = seqlens
    inputs = make_inputs(place, 2, seqlen_q, seqlen_k, (4, 4))
    shared = {name: inputs[name].narrow(expanded_dim, 0, 1) for name in ("k", "v")}
    expanded = {name: tensor.expand(2, seqlen_k, 4, 64) for name, tensor in shared.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in expanded.items()}
    dout = random_dout(inputs)
    check(kernel, {**inputs, **expanded}, dout, causal=True)
    run_both(kernel, {**inputs, **contiguous}, {**inputs, **expanded}, dout)


def test_expanded_queries_and_packed_keys(kernel, place):
    inputs = make_packed(place, [33, 130], heads=(4, 2))
    expanded = {
        "q": inputs["q"][:1].expand(inputs["q"].shape),
        "k": inputs["k"][:, :1].expand(inputs["k"].shape),
    }
    contiguous = {name: tensor.contiguous() for name, tensor in expanded.items()}
    run_both(kernel, {**inputs, **contiguous}, {**inputs, **expanded}, random_dout(inputs))


@pytest.mark.parametrize(
    "dout_layout",
    [
        lambda dout: dout.transpose(1, 2).contiguous().transpose(1, 2),
        lambda dout: dout.movedim(1, -1).contiguous().movedim(-1, 1),
        surrounded_by_nan,
        lambda dout: dout[:1, :1, :1].expand(dout.shape),
        lambda dout: dout[..., :1].expand(dout.shape),
        lambda dout: dout[:1, :1, :1, :1].expand(dout.shape),
    ],
    ids=["heads first", "head_dim first", "gaps", "one row", "one column", "one value"],
)
def test_layout_of_dout(kernel, place, dout_layout):
    inputs = make_inputs(place, 2, 33, 70)
    dout = dout_layout(random_dout(inputs))
    check(kernel, inputs, dout)
    strided = run_ours(kernel, inputs, dout, deterministic=True)
    contiguous = run_ours(kernel, inputs, dout.contiguous(), deterministic=True)
    for name in contiguous:
        assert_same_bits(name, strided[name], contiguous[name])


def test_layout_of_dlse(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 33, 70)
    dout = random_dout(inputs)
    dlse = torch.randn(33, 4, 2, device=bf16_place["device"]).permute(2, 1, 0)
    strided = run_ours(kernel, inputs, dout, dlse, deterministic=True)
    contiguous = run_ours(kernel, inputs, dout, dlse.contiguous(), deterministic=True)
    for name in contiguous:
        assert_same_bits(name, strided[name], contiguous[name])


@pytest.mark.parametrize("strided", ["k", "v", "q"])
def test_gradients_are_contiguous_whatever_the_layout_of_one_input(kernel, bf16_place, strided):
    inputs = make_inputs(bf16_place, 2, 40, 40, (4, 4))
    inputs[strided] = inputs[strided].transpose(1, 2).contiguous().transpose(1, 2)
    for name, tensor in run_ours(kernel, inputs).items():
        assert tensor.is_contiguous(), name
