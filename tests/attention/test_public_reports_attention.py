"""Inputs that broke attention kernels elsewhere, as their public reports give them. Each test names
its report; the behaviour that it asks for follows from the mathematics."""

import pytest
import torch
from errors import (
    FLOOR,
    assert_same_bits,
    assert_within,
    assert_zero,
    largest_difference,
)

from .comparison import (
    check,
    cumulative,
    make_inputs,
    make_packed,
    random_dout,
    run_ours,
    with_gradients,
)

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
CUDA_FP16 = {"device": torch.device("cuda"), "dtype": torch.float16}


# ---- grouped heads ----


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("num_heads_kv", [2, 8])
def test_backward_with_fewer_kv_heads(kernel, bf16_place, num_heads_kv, packed):
    """huggingface/kernels-community#1085"""
    heads = (8, num_heads_kv)
    if packed:
        inputs = make_packed(bf16_place, [8], heads=heads)
    else:
        inputs = make_inputs(bf16_place, 1, 8, 8, heads)
    check(kernel, inputs, torch.ones_like(random_dout(inputs)), causal=True)


def test_padding_free_training_on_14_query_and_2_kv_heads(kernel, bf16_place):
    """huggingface/trl#6979: a short run follows the run on separate sequences."""
    lengths, width, steps = [5, 1, 17], 64, 8
    total = sum(lengths)
    index = cumulative(lengths, bf16_place["device"])
    x = torch.randn(total, width, **bf16_place)
    target = torch.randn(total, 14 * 64, **bf16_place)
    first = torch.randn(width, 18 * 64, **bf16_place) * width**-0.5

    def packed(q, k, v):
        return kernel.flash_attn_varlen_func(q, k, v, index, index, 17, 17, causal=True)

    def separate(q, k, v):
        sequences = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        outs = [kernel.flash_attn_func(*(t[None] for t in s), causal=True)[0] for s in sequences]
        return torch.cat(outs)

    def losses(attention):
        weight = first.clone().requires_grad_()
        history = []
        for _ in range(steps):
            qkv = (x @ weight).view(total, 18, 64)
            out = attention(qkv[:, :14], qkv[:, 14:16], qkv[:, 16:])
            loss = (out.reshape(total, -1) - target).float().pow(2).mean()
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = (weight - 2 * gradient).detach().requires_grad_()
            history.append(loss.item())
        return torch.tensor(history)

    ours, expected = losses(packed), losses(separate)
    assert expected[-1] < expected[0]
    assert largest_difference(ours, expected) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (8, 0), (2, 4)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_backward_refuses_heads_that_do_not_divide(kernel, bf16_place, heads):
    """fla-org/flash-linear-attention#1029; forward: test_refusals.py"""
    inputs = make_inputs(bf16_place, 1, 5, 5, heads, 16)
    lse = torch.zeros(1, heads[0], 5, device=bf16_place["device"])
    with pytest.raises(ValueError, match=f"q has {heads[0]} heads and k and v have {heads[1]}"):
        kernel._flash_attn_backward(
            inputs["q"], **inputs, out=inputs["q"], softmax_lse=lse, dq=None, dk=None, dv=None,
            dropout_p=0.0, softmax_scale=1.0, causal=False, window_size_left=-1,
            window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
        )  # fmt: skip


@pytest.mark.parametrize("heads", [(12, 2), (16, 4)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_group_size_that_is_not_the_number_of_kv_heads(kernel, bf16_place, heads):
    """XunhaoLai/native-sparse-attention-triton#27"""
    ours = check(kernel, make_inputs(bf16_place, 2, 70, 70, heads), causal=True)
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name


def test_deterministic_backward_returns_and_repeats(kernel, bf16_place):
    """Dao-AILab/flash-attention#1839"""
    inputs = make_inputs(bf16_place, 1, 1024, 1024, (8, 2), 128)
    dout = random_dout(inputs)
    runs = [run_ours(kernel, inputs, dout, causal=True, deterministic=True) for _ in range(3)]
    for again in runs[1:]:
        for name in runs[0]:
            assert_same_bits(name, again[name], runs[0][name])


# ---- rows without keys, empty sequences ----


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_query_and_one_key(kernel, device):
    """Dao-AILab/flash-attention#334"""
    place = {"device": torch.device(device), "dtype": torch.float16}
    inputs = {name: torch.randn(1, 1, 1, 16, **place) * 3 for name in ("q", "k", "v")}
    ours = run_ours(kernel, inputs)
    assert_same_bits("out", ours["out"], inputs["v"])
    assert_same_bits("dv", ours["dv"], torch.ones_like(inputs["v"]))
    # dP - delta is the difference of two float32 sums of the same 16 products
    for name in ("dq", "dk"):
        assert_within(name, ours[name], torch.zeros_like(ours[name]), 2 * FLOOR)


def test_causal_mask_is_aligned_bottom_right(kernel, bf16_place):
    """Dao-AILab/flash-attention#1778"""
    inputs = make_inputs(bf16_place, 1, 5, 2, (1, 1), 8)
    ours = check(kernel, inputs, causal=True)
    assert_zero("out", ours["out"][:, :3])
    assert_same_bits("out", ours["out"][0, 3], inputs["v"][0, 0])
    assert ours["out"][0, 4].any()
    for name, tensor in ours.items():
        assert name == "softmax_lse" or tensor.isfinite().all(), name


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sequences_with_keys_and_without_queries(kernel, bf16_place, head_dim):
    """Dao-AILab/flash-attention#2562"""
    inputs = make_packed(bf16_place, [0, 7, 0], [5, 9, 3], (4, 1), head_dim)
    ours = check(kernel, inputs)
    for name in ("dk", "dv"):
        assert_zero(name, ours[name][:5])
        assert_zero(name, ours[name][14:])


@pytest.mark.gpu
def test_large_sequences_with_keys_and_without_queries(kernel):
    """Dao-AILab/flash-attention#2562, as reported"""
    lengths_q, lengths_k = [0, 1208, 840, 0], [2538, 1742, 840, 3072]
    inputs = make_packed(CUDA_BF16, lengths_q, lengths_k, (4, 1), 256)
    ours = check(kernel, inputs)
    for name in ("dk", "dv"):
        assert_zero(name, ours[name][:2538])
        assert_zero(name, ours[name][5120:])


def test_nothing_left_after_padding_is_removed(kernel, bf16_place):
    """verl-project/verl#1270"""
    inputs = make_packed(bf16_place, [])
    ours = run_ours(kernel, inputs, causal=True)
    assert ours["out"].shape == (0, 4, 64)
    assert ours["softmax_lse"].shape == (4, 0)
    assert ours["dq"].shape == (0, 4, 64)


# ---- sizes ----


@pytest.mark.gpu
def test_scratch_of_more_than_two_to_the_31_elements(kernel):
    """Dao-AILab/flash-attention#1500"""
    batch_size = 17_000
    inputs = {n: torch.randn(batch_size, 128, 16, 64, **CUDA_BF16) for n in ("q", "k", "v")}
    leaves = with_gradients(inputs)
    out = kernel.flash_attn_func(**leaves, causal=True)
    grads = torch.autograd.grad(out, [leaves[n] for n in ("q", "k", "v")], torch.ones_like(out))
    for entry in (0, batch_size - 1):
        alone = run_ours(kernel, {n: t[entry : entry + 1] for n, t in inputs.items()}, causal=True)
        unit = 4 * torch.finfo(torch.bfloat16).eps
        for name, tensor in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
            allowed = unit * alone[name].abs().max().item()
            assert_within(name, tensor[entry : entry + 1], alone[name], allowed)


def check_equal_lengths(kernel, place, count, length):
    """Packed sequences of one length are a dense batch."""
    dense = make_inputs(place, count, length, length, (1, 1))
    packed = {name: tensor.flatten(0, 1) for name, tensor in dense.items()}
    index = torch.arange(0, (count + 1) * length, length, dtype=torch.int32)
    packed["cu_seqlens_q"] = packed["cu_seqlens_k"] = index.to(place["device"])
    expected = run_ours(kernel, dense, causal=True)
    ours = run_ours(kernel, packed, causal=True)
    unit = 4 * torch.finfo(place["dtype"]).eps
    for name in ("out", "dq", "dk", "dv"):
        allowed = unit * expected[name].abs().max().item()
        assert_within(name, ours[name], expected[name].flatten(0, 1), allowed)


@pytest.mark.parametrize("count", [65_535, 65_536])
def test_more_sequences_than_a_grid_axis_holds(kernel, bf16_place, count):
    """Dao-AILab/flash-attention#1786, the boundary"""
    check_equal_lengths(kernel, bf16_place, count, 2)


@pytest.mark.gpu
def test_eighty_thousand_sequences(kernel):
    """Dao-AILab/flash-attention#1786, as reported"""
    check_equal_lengths(kernel, CUDA_FP16, 80_000, 16)


# ---- strides ----


@pytest.mark.parametrize("form", ["dense", "packed", "kv-packed"])
def test_last_axis_without_unit_stride(kernel, bf16_place, form):
    """Dao-AILab/flash-attention#2777"""
    stored = torch.randn(2, 4, 64, 33, **bf16_place)
    q = stored.permute(0, 3, 1, 2)
    assert q.stride(-1) != 1
    inputs = {**make_inputs(bf16_place, 2, 33, 33, (4, 2)), "q": q}
    dout = random_dout(inputs)
    contiguous = {name: tensor.contiguous() for name, tensor in inputs.items()}
    expected = run_ours(kernel, contiguous, dout, causal=True, deterministic=True)
    leaves = with_gradients(inputs)
    q, k, v = (leaves[name] for name in ("q", "k", "v"))
    options = {"causal": True, "deterministic": True}
    if form == "dense":
        out = kernel.flash_attn_func(q, k, v, **options)
    elif form == "kv-packed":
        out = kernel.flash_attn_kvpacked_func(q, torch.stack([k, v], dim=2), **options)
    else:
        index = cumulative([33], bf16_place["device"])
        outs = [
            kernel.flash_attn_varlen_func(q[b], k[b], v[b], index, index, 33, 33, **options)
            for b in range(2)
        ]
        out = torch.stack(outs)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    unit = 4 * torch.finfo(torch.bfloat16).eps
    for name, result in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        allowed = unit * expected[name].abs().max().item()
        assert_within(name, result, expected[name], allowed)


def test_sum_then_backward(kernel, bf16_place):
    """Dao-AILab/flash-attention#325: the gradient of a sum is expanded, with strides of zero."""
    inputs = make_inputs(bf16_place, 1, 5, 5, (2, 2), 8)
    leaves = with_gradients(inputs)
    kernel.flash_attn_func(**leaves, causal=True).sum().backward()
    expected = run_ours(kernel, inputs, causal=True)
    for name in ("q", "k", "v"):
        assert_same_bits(f"d{name}", leaves[name].grad, expected[f"d{name}"])


@pytest.mark.parametrize("head_major", [False, True], ids=["fused", "head-major"])
def test_slices_of_a_fused_projection_at_head_dim_256(kernel, bf16_place, head_major):
    """Dao-AILab/flash-attention#2541"""
    if head_major:
        strided = {n: torch.randn(2, 4, 130, 256, **bf16_place).transpose(1, 2) for n in "qkv"}
    else:
        fused = torch.randn(2, 130, 3, 4, 256, **bf16_place)
        strided = dict(zip("qkv", fused.unbind(2), strict=True))
    ours = check(kernel, strided, ours_options={"deterministic": True})
    assert all(tensor.isfinite().all() for tensor in ours.values())


def test_gradient_of_a_transposed_v_beside_a_contiguous_k(kernel, bf16_place):
    """pytorch/pytorch#119500"""
    k = torch.randn(2, 513, 16, 64, **bf16_place)
    v = torch.randn(2, 16, 513, 64, **bf16_place).transpose(1, 2)
    inputs = {"q": torch.randn(2, 20, 16, 64, **bf16_place), "k": k, "v": v}
    ours = check(kernel, inputs)
    assert ours["dv"].shape == v.shape
    assert ours["dv"].is_contiguous()


@pytest.mark.parametrize("transposed", ["k", "v", "kv"])
def test_gradients_of_fakes_have_the_strides_of_real_ones(kernel, bf16_place, transposed):
    """pytorch/pytorch#119500: a compiled backward pass believes what the fake tensors say."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = make_inputs(bf16_place, 2, 20, 33, (8, 4), 64)
    for name in transposed:
        inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)

    def gradients(tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors.values()]
        out = kernel.flash_attn_func(*leaves)
        return torch.autograd.grad(out, leaves, torch.empty_like(out))

    real = gradients(inputs)
    with FakeTensorMode() as mode:
        fake = gradients({name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    for name, a, b in zip(inputs, real, fake, strict=True):
        assert a.shape == b.shape == inputs[name].shape, name
        assert a.stride() == b.stride(), name
