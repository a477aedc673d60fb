"""Dense attention against the reference, forward and backward: each term of a score alone, and all
of them together."""

import pytest
import torch
from errors import assert_same_bits, assert_within, assert_zero

from .comparison import check, make_inputs, random_dlse, run_ours

SEQLENS = [(1, 1), (1, 1000), (63, 65), (64, 64), (127, 128), (128, 127), (129, 129), (1000, 64)]
# One below, at and above the sizes that kernels are written for, odd ones, and the smallest
HEAD_DIMS = [1, 3, 8, 16, 40, 64, 72, 96, 104, 127, 128, 129, 160, 192, 224, 256, 257, 320, 512]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_seqlens(kernel, place, seqlens, causal):
    check(kernel, make_inputs(place, 2, *seqlens, (4, 2)), causal=causal)


def test_one_long_sequence(kernel, bf16_place):
    check(kernel, make_inputs(bf16_place, 1, 129, 4096, (2, 1), 64), causal=True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(kernel, bf16_place, head_dim):
    check(kernel, make_inputs(bf16_place, 1, 65, 129, (4, 2), head_dim), causal=True)


@pytest.mark.parametrize("head_dim", [3, 40, 104, 256])
def test_head_dims_in_each_dtype(kernel, place, head_dim):
    check(kernel, make_inputs(place, 1, 33, 70, (2, 1), head_dim), causal=True)


@pytest.mark.parametrize("head_dims", [(192, 128), (64, 128), (128, 40), (33, 512), (512, 8)])
def test_value_head_dim_that_differs(kernel, bf16_place, head_dims):
    check(kernel, make_inputs(bf16_place, 2, 65, 129, (4, 2), *head_dims), causal=True)


@pytest.mark.parametrize("softmax_scale", [0.3, 0.0, -0.2, 1.5])
def test_softmax_scale(kernel, place, softmax_scale):
    check(kernel, make_inputs(place, 2, 65, 70), softmax_scale=softmax_scale)


WINDOWS = [(0, 0), (7, -1), (-1, 7), (2, 3), (64, 64), (100, 0), (200, 500), (0, 128), (10**12, 3)]


@pytest.mark.parametrize("seqlens", [(129, 129), (65, 200), (200, 65)], ids=str)
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
def test_window(kernel, bf16_place, window_size, seqlens):
    check(kernel, make_inputs(bf16_place, 1, *seqlens, (4, 2)), window_size=window_size)


@pytest.mark.parametrize("window_size", [(16, 16), (0, -1), (-1, 5)], ids=str)
def test_window_with_causal(kernel, place, window_size):
    inputs = make_inputs(place, 1, 130, 130)
    ours = check(kernel, inputs, window_size=window_size, causal=True)
    # causal makes the right bound 0, whatever it was
    bounded = run_ours(kernel, inputs, window_size=(window_size[0], 0))
    assert_same_bits("out", ours["out"], bounded["out"])


def test_window_beyond_all_keys_is_no_window(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 70, 20)
    plain = run_ours(kernel, inputs)
    wide = run_ours(kernel, inputs, window_size=(2**62, 2**62))
    for name in plain:
        assert_same_bits(name, wide[name], plain[name])


def test_window_wider_than_the_keys_is_not_cut_to_them(kernel, bf16_place):
    # Row 0 stands at key -50: with a right bound of 45 it sees nothing, with 50 it sees key 0.
    inputs = make_inputs(bf16_place, 1, 70, 20)
    blind = check(kernel, inputs, window_size=(-1, 45))
    assert_zero("out", blind["out"][:, :5])
    assert blind["out"][:, 5].any()
    sees = check(kernel, inputs, window_size=(-1, 50))
    assert sees["out"][:, 0].any()


@pytest.mark.parametrize("softcap", [1.0, 15.0, 50.0])
def test_softcap(kernel, place, softcap):
    inputs = make_inputs(place, 1, 65, 130)
    inputs["q"] *= 8  # scores large enough for the cap to matter
    check(kernel, inputs, softcap=softcap, causal=True)


@pytest.mark.parametrize("per_batch", [False, True], ids=["heads", "batch-heads"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_alibi(kernel, place, causal, per_batch):
    inputs = make_inputs(place, 2, 65, 130, (4, 2))
    shape = (2, 4) if per_batch else (4,)
    inputs["alibi_slopes"] = torch.rand(shape, device=place["device"])
    check(kernel, inputs, causal=causal)


def test_alibi_slopes_may_be_strided(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 33, 33, (4, 2))
    slopes = torch.rand(4, 2, device=bf16_place["device"])
    inputs["alibi_slopes"] = slopes.t()
    check(kernel, inputs)


def all_terms(place, seqlen_q, seqlen_k):
    inputs = make_inputs(place, 2, seqlen_q, seqlen_k, (6, 2), 72, 40)
    device = place["device"]
    inputs["alibi_slopes"] = torch.rand(2, 6, device=device)
    inputs["s_aux"] = torch.randn(6, **place)
    inputs["attn_bias"] = torch.randn(2, 6, seqlen_q, seqlen_k, **place)
    return inputs


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlens", [(65, 130), (130, 65)], ids=str)
def test_all_terms_together(kernel, place, seqlens, causal):
    inputs = all_terms(place, *seqlens)
    check(
        kernel,
        inputs,
        dsoftmax_lse=random_dlse(inputs),
        causal=causal,
        window_size=(90, 20),
        softcap=20.0,
        softmax_scale=0.2,
    )


@pytest.mark.parametrize(
    "shape",
    [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)],
    ids=["no batch", "no query", "no key", "no rows", "nothing"],
)
def test_empty_dimensions(kernel, place, shape):
    batch_size, seqlen_q, seqlen_k = shape
    inputs = make_inputs(place, batch_size, seqlen_q, seqlen_k)
    ours = run_ours(kernel, inputs, causal=True)
    assert ours["out"].shape == inputs["q"].shape
    for name in ("out", "dq", "dk", "dv"):
        assert_zero(name, ours[name])
    assert torch.isneginf(ours["softmax_lse"]).all()


def test_one_query_and_one_key(kernel, place):
    inputs = {name: torch.randn(1, 1, 1, 16, **place) * 3 for name in ("q", "k", "v")}
    ours = check(kernel, inputs)
    if place["dtype"] != torch.float32:  # there the last bit of 1 / row_sum may show
        assert_same_bits("out", ours["out"], inputs["v"])


def test_scores_far_from_zero(kernel, place):
    # exp(score) would overflow float32; the row maximum must be taken off first.
    inputs = make_inputs(place, 1, 40, 90, (2, 1), 64)
    inputs["q"] = inputs["q"].sign() * 4
    inputs["k"] = inputs["k"].sign() * 4
    ours = run_ours(kernel, inputs, softmax_scale=1.0)
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name


def test_deterministic_flag_changes_no_forward_bit(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 100, 100)
    plain = run_ours(kernel, inputs)
    deterministic = run_ours(kernel, inputs, deterministic=True)
    assert_same_bits("out", deterministic["out"], plain["out"])


def test_results_do_not_share_memory_with_inputs(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 1, 1, (1, 1), 8)
    out = kernel.flash_attn_func(**inputs)
    for name, tensor in inputs.items():
        assert out.data_ptr() != tensor.data_ptr(), name


def test_packed_forms_are_the_plain_one(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 65, 65, (4, 4))
    plain = run_ours(kernel, inputs, causal=True, deterministic=True)
    dout = torch.ones_like(plain["out"])
    qkv = torch.stack(list(inputs.values()), dim=2).requires_grad_()
    out = kernel.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
    (dqkv,) = torch.autograd.grad(out, qkv, dout)
    assert_same_bits("out", out, plain["out"])
    for index, name in enumerate(("dq", "dk", "dv")):
        assert_same_bits(name, dqkv[:, :, index], plain[name])

    q = inputs["q"].requires_grad_()
    kv = torch.stack([inputs["k"], inputs["v"]], dim=2).requires_grad_()
    out = kernel.flash_attn_kvpacked_func(q, kv, causal=True, deterministic=True)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    assert_same_bits("out", out, plain["out"])
    for name, gradient in (("dq", dq), ("dk", dkv[:, :, 0]), ("dv", dkv[:, :, 1])):
        assert_same_bits(name, gradient, plain[name])


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input_alone(kernel, bf16_place, wanted):
    inputs = make_inputs(bf16_place, 1, 33, 70)
    expected = run_ours(kernel, inputs, deterministic=True)
    leaf = inputs[wanted].clone().requires_grad_()
    out = kernel.flash_attn_func(**{**inputs, wanted: leaf}, deterministic=True)
    out.backward(torch.ones_like(out))
    assert_same_bits(f"d{wanted}", leaf.grad, expected[f"d{wanted}"])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(kernel, bf16_place, mode):
    inputs = make_inputs(bf16_place, 1, 33, 70)
    expected = run_ours(kernel, inputs)
    with mode():
        out = kernel.flash_attn_func(**inputs)
    assert not out.requires_grad
    assert_same_bits("out", out, expected["out"])


def test_gradients_accumulate(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 33, 33, (2, 2))
    shared = inputs["q"].requires_grad_()
    out = kernel.flash_attn_func(shared, shared, shared, deterministic=True)
    out.backward(torch.ones_like(out))
    parts = run_ours(kernel, {"q": shared, "k": shared, "v": shared}, deterministic=True)
    total = sum(parts[name].double() for name in ("dq", "dk", "dv"))
    allowed = 2 * torch.finfo(torch.bfloat16).eps * total.abs().max().item()
    assert_within("sum of gradients", shared.grad, total, allowed)
