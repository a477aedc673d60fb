"""Inputs that broke attention kernels elsewhere, continued: head dims, the terms of a score,
determinism, the log-sum-exp, compilers and autocast. See test_public_reports_attention."""

import ast
from pathlib import Path

import pytest
import torch
from errors import (
    assert_same_bits,
    assert_within,
    assert_zero,
    poisoned_memory,
)

from .comparison import (
    check,
    make_inputs,
    make_packed,
    random_dout,
    run_ours,
    with_gradients,
)

CUDA_BF16 = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
CUDA_FP16 = {"device": torch.device("cuda"), "dtype": torch.float16}


# ---- head dims ----


def test_head_dim_104(kernel, bf16_place):
    """Dao-AILab/flash-attention#2492"""
    check(kernel, make_packed(bf16_place, [61, 69], heads=(16, 16), head_dim=104), causal=True)


@pytest.mark.gpu
def test_head_dim_104_as_reported(kernel):
    """Dao-AILab/flash-attention#2492"""
    check(kernel, make_packed(CUDA_BF16, [3000, 4200], heads=(16, 16), head_dim=104), causal=True)


def test_head_dims_192_and_128(kernel, bf16_place):
    """Dao-AILab/flash-attention#1487"""
    check(kernel, make_inputs(bf16_place, 2, 70, 130, (8, 8), 192, 128), causal=True)


# ---- windows ----


def test_a_window_of_three_tokens_is_a_left_bound_of_two(kernel, bf16_place):
    """huggingface/transformers#39408"""
    place = bf16_place
    q = torch.zeros(1, 6, 1, 8, **place)
    v = torch.eye(6, **place)[None, :, None]
    out = kernel.flash_attn_func(q, torch.zeros_like(q), v, causal=True, window_size=(2, 2))
    seen = (out[0, :, 0] != 0).int()
    band = torch.ones(6, 6, dtype=torch.int32, device=place["device"]).tril().triu(-2)
    assert torch.equal(seen, band)


def test_a_window_that_is_empty_by_design_is_refused(kernel, bf16_place):
    """Dao-AILab/flash-attention#2490: never widened to full attention"""
    with pytest.raises(ValueError, match=r"window_size is \(7, -8\)"):
        kernel.flash_attn_func(**make_inputs(bf16_place), window_size=(7, -8))


# ---- softcap, ALiBi, sinks ----


@pytest.mark.parametrize("shape", [(8,), (1, 8)], ids=str)
def test_alibi_of_a_decode_step_is_that_of_the_training_pass(kernel, bf16_place, shape):
    """Dao-AILab/flash-attention#907"""
    inputs = make_inputs(bf16_place, 1, 9, 9, (8, 2))
    slopes = torch.rand(shape, device=bf16_place["device"])
    whole = kernel.flash_attn_func(**inputs, causal=True, alibi_slopes=slopes)
    for step in range(9):
        seen = slice(0, step + 1)
        decoded = kernel.flash_attn_func(
            inputs["q"][:, step : step + 1], inputs["k"][:, seen], inputs["v"][:, seen],
            causal=True, alibi_slopes=slopes,
        )  # fmt: skip
        allowed = 2 * torch.finfo(torch.bfloat16).eps * whole.abs().max().item()
        assert_within("out", decoded[:, 0], whole[:, step], allowed)


def test_sink_has_a_gradient(kernel, bf16_place):
    """Dao-AILab/flash-attention#1973; its value: test_sink.py"""
    inputs = make_inputs(bf16_place, 2, 40, 40, (8, 2))
    inputs["s_aux"] = torch.randn(8, **bf16_place)
    assert check(kernel, inputs, causal=True)["ds_aux"].all()


def test_a_sink_of_none_is_accepted(kernel, bf16_place):
    """huggingface/transformers#40434"""
    inputs = make_packed(bf16_place, [5, 9])
    lengths = {"max_seqlen_q": 9, "max_seqlen_k": 9}
    with_none = kernel.flash_attn_varlen_func(**inputs, **lengths, s_aux=None)
    assert_same_bits("out", with_none, kernel.flash_attn_varlen_func(**inputs, **lengths))


# ---- dropout and determinism ----


def test_dropout_is_there(kernel, bf16_place):
    """huggingface/kernels-community#997; its mask: test_dropout.py"""
    inputs = make_inputs(bf16_place, 1, 65, 65)
    ours = run_ours(kernel, inputs, dropout_p=0.1)
    assert not torch.equal(ours["out"], run_ours(kernel, inputs)["out"])


@pytest.mark.gpu
def test_fifty_backward_passes_of_many_rows_on_few_keys(kernel):
    """Dao-AILab/flash-attention#359: a race that showed now and then"""
    inputs = make_inputs(CUDA_FP16, 300, 2048, 128, (1, 1), 128)
    dout = random_dout(inputs)
    first = check(kernel, inputs, dout)
    for _ in range(50):
        again = run_ours(kernel, inputs, dout)
        for name in first:
            allowed = 4 * torch.finfo(torch.float16).eps * first[name].abs().max().item()
            assert_within(name, again[name], first[name], allowed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2, 1024, (12, 12), 64), (2, 512, (8, 8), 64), (1, 512, (16, 2), 128)], ids=str
)
def test_two_hundred_deterministic_backward_passes_beside_other_work(kernel, shape):
    """Dao-AILab/flash-attention#2244"""
    batch_size, seqlen, heads, head_dim = shape
    inputs = make_inputs(CUDA_FP16, batch_size, seqlen, seqlen, heads, head_dim)
    dout = random_dout(inputs)
    first = run_ours(kernel, inputs, dout, deterministic=True)
    other_stream = torch.cuda.Stream()
    other_work = torch.randn(2048, 2048, **CUDA_FP16)
    for repeat in range(200):
        if repeat >= 100:
            with torch.cuda.stream(other_stream):
                other_work @ other_work
        again = run_ours(kernel, inputs, dout, deterministic=True)
        for name in first:
            assert_same_bits(name, again[name], first[name])


@pytest.mark.gpu
def test_backward_right_after_the_projection_that_feeds_it(kernel):
    """Dao-AILab/flash-attention#2481: dout must be complete before it is read"""
    inputs = make_inputs(CUDA_BF16, 2, 1024, 1024, (8, 2), 64)
    weight = torch.randn(512, 512, **CUDA_BF16)

    def gradients_of(synchronised):
        leaves = with_gradients(inputs)
        out = kernel.flash_attn_func(**leaves, causal=True, deterministic=True)
        if synchronised:
            out.register_hook(lambda gradient: torch.cuda.synchronize())
        loss = (out.flatten(2) @ weight).float().pow(2).sum()
        return torch.autograd.grad(loss, [leaves[name] for name in ("q", "k", "v")])

    expected = gradients_of(synchronised=True)
    for _ in range(50):
        for name, ours, alone in zip("qkv", gradients_of(False), expected, strict=True):
            assert_same_bits(f"d{name}", ours, alone)


# ---- log-sum-exp ----


def test_a_loss_on_lse_trains(kernel, bf16_place):
    """Dao-AILab/flash-attention#1137"""
    inputs = make_inputs(bf16_place, 1, 16, 16, (2, 1))
    leaves = with_gradients(inputs)
    _, lse = kernel.flash_attn_func(**leaves, return_softmax_lse=True)
    (lse**2).sum().backward()
    assert leaves["q"].grad.any()
    assert leaves["k"].grad.any()
    assert_zero("dv", leaves["v"].grad)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_one_layout_of_packed_lse(kernel, bf16_place, heads):
    """Dao-AILab/flash-attention#876"""
    ours = run_ours(kernel, make_packed(bf16_place, [3, 7], heads=heads))
    assert ours["softmax_lse"].shape == (4, 10)
    assert ours["softmax_lse"].dtype == torch.float32


# ---- compile, capture, devices ----


def test_the_package_imports_itself_by_relative_names_only(kernel):
    """huggingface/kernels-community#312"""
    allowed = {"__future__", "collections", "ctypes", "math", "numbers", "re", "torch", "typing"}
    files = sorted(Path(kernel.__file__).parent.glob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_backward_of_the_loaded_build_under_compile(kernel, bf16_place):
    """huggingface/kernels-community#312"""
    torch._dynamo.reset()
    inputs = make_inputs(bf16_place, 2, 512, 512, (8, 8))
    leaves = with_gradients(inputs)
    call = torch.compile(kernel.flash_attn_func, fullgraph=True, backend="aot_eager")
    call(**leaves, causal=True, deterministic=True).sum().backward()
    expected = run_ours(kernel, inputs, causal=True, deterministic=True)
    for name in ("q", "k", "v"):
        assert_same_bits(f"d{name}", leaves[name].grad, expected[f"d{name}"])


@pytest.mark.gpu
def test_a_captured_packed_call_does_not_depend_on_the_longest_sequence(kernel):
    """Dao-AILab/flash-attention#1164, and more: any lengths may be replayed"""
    inputs = make_packed(CUDA_BF16, [128, 128])
    inputs["cu_seqlens_k"] = inputs["cu_seqlens_q"].clone()
    lengths = {"max_seqlen_q": 128, "max_seqlen_k": 128}
    kernel.flash_attn_varlen_func(**inputs, **lengths, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.flash_attn_varlen_func(**inputs, **lengths, causal=True)
    for split in (128, 3, 256, 0):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            inputs[name].copy_(torch.tensor([0, split, 256], dtype=torch.int32))
        graph.replay()
        expected = kernel.flash_attn_varlen_func(**inputs, **lengths, causal=True)
        assert_same_bits("out", out, expected)


@pytest.mark.gpu
def test_tensors_on_a_gpu_that_is_not_the_current_one(kernel):
    """Dao-AILab/flash-attention#1793"""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; needs two")
    inputs = make_inputs({"device": torch.device("cuda:0"), "dtype": torch.bfloat16}, 1, 70, 70)
    dout = random_dout(inputs)
    expected = run_ours(kernel, inputs, dout, causal=True, deterministic=True)
    there = {name: tensor.to("cuda:1") for name, tensor in inputs.items()}
    used_before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
    ours = run_ours(kernel, there, dout.to("cuda:1"), causal=True, deterministic=True)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == used_before
    for name in expected:
        assert ours[name].device == torch.device("cuda:1")
        assert_same_bits(name, ours[name].cpu(), expected[name].cpu())


# ---- autocast ----


def test_dtypes_that_differ_under_autocast(kernel, bf16_place):
    """huggingface/diffusers#14104: the error prints the three dtypes and the fix"""
    inputs = make_inputs(bf16_place)
    inputs["q"], inputs["k"] = inputs["q"].float(), inputs["k"].float()
    device_type = bf16_place["device"].type
    with torch.autocast(device_type, dtype=torch.bfloat16), pytest.raises(ValueError) as caught:  # noqa: PT011
        kernel.flash_attn_func(**inputs)
    text = str(caught.value)
    for part in (
        "q is torch.float32",
        "k is torch.float32",
        "v is torch.bfloat16",
        "q.to(v.dtype)",
    ):
        assert part in text


def test_autocast_casts_nothing_silently(kernel):
    inputs = make_inputs({"device": torch.device("cpu"), "dtype": torch.float32}, 1, 20, 20)
    plain = kernel.flash_attn_func(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel.flash_attn_func(**inputs)
    assert_same_bits("out", out, plain)


def test_autocast_around_projections(kernel, bf16_place):
    device = bf16_place["device"]
    projection = torch.nn.Linear(64, 3 * 64).to(device)
    x = torch.randn(2, 33, 64, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16), poisoned_memory():
        out = kernel.flash_attn_qkvpacked_func(projection(x).view(2, 33, 3, 1, 64), causal=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert projection.weight.grad.isfinite().all()
    assert projection.weight.grad.any()
