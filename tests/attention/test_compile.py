"""torch.compile, fakes and autograd registration."""

import pytest
import torch
from errors import assert_same_bits, largest_difference
from torch._dynamo.testing import CompileCounterWithBackend

from .comparison import make_inputs, make_packed, random_dlse, random_dout, with_gradients

TENSOR_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "s_aux", "attn_bias")


def ops_of(kernel):
    return kernel._ops.ops


def terms(place, inputs, packed):
    num_heads_q = inputs["q"].shape[-2]
    device = place["device"]
    extra = {
        "alibi_slopes": torch.rand(num_heads_q, device=device),
        "s_aux": torch.randn(num_heads_q, device=device),
    }
    rows, columns = (1, 20) if packed else (inputs["q"].shape[1], inputs["k"].shape[1])
    shape = (num_heads_q, rows, columns) if packed else (1, num_heads_q, rows, columns)
    extra["attn_bias"] = torch.randn(shape, **place)
    return {**inputs, **extra}


def op_arguments(inputs, dropout_p=0.0):
    rng_state = None
    if dropout_p > 0:
        rng_state = torch.tensor([3, 5], device=inputs["q"].device)
    scalars = (0.2, True, 9, -1, 0.0, dropout_p, True, False)
    tensors = [inputs.get(name) for name in TENSOR_NAMES]
    return (inputs["q"], inputs["k"], inputs["v"], *tensors, rng_state, *scalars)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("with_terms", [False, True], ids=["plain", "all terms"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck_of_forward(kernel, bf16_place, packed, with_terms, dropout_p):
    # Strided inputs, so that the fake's strides are compared with those of real results
    if packed:
        inputs = make_packed(bf16_place, [5, 0, 9], [20, 3, 7], (4, 2), 12, more_rows=2)
    else:
        inputs = make_inputs(bf16_place, 2, 9, 20, (4, 2), 12, 20)
        inputs["v"] = inputs["v"].transpose(1, 2).contiguous().transpose(1, 2)
    if with_terms:
        inputs = terms(bf16_place, inputs, packed)
    arguments = op_arguments(with_gradients(inputs), dropout_p)
    torch.library.opcheck(ops_of(kernel).attention_fwd.default, arguments)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck_of_backward(kernel, bf16_place, packed):
    if packed:
        inputs = make_packed(bf16_place, [5, 0, 9], [20, 3, 7], (4, 2), 12)
    else:
        inputs = make_inputs(bf16_place, 2, 9, 20, (4, 2), 12, 20)
        inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    inputs = terms(bf16_place, inputs, packed)
    forward_arguments = op_arguments(inputs)
    out, lse = ops_of(kernel).attention_fwd(*forward_arguments)
    tensors, scalars = forward_arguments[3:9], forward_arguments[9:-1]
    for wanted in (True, False):
        arguments = (random_dout(inputs), random_dlse(inputs) if wanted else None)
        arguments += (*forward_arguments[:3], out, lse, *tensors, *scalars, wanted, wanted, False)
        torch.library.opcheck(ops_of(kernel).attention_bwd.default, arguments)


def compiled(call, **options):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, **options)


def forward_and_backward(call, inputs, dout):
    leaves = with_gradients(inputs)
    values = [leaves[name] for name in ("q", "k", "v")]
    out = call(**leaves)
    return [out.detach(), *torch.autograd.grad(out, values, dout)]


def assert_same_results(call, inputs, **options):
    dout = random_dout(inputs)
    expected = forward_and_backward(call, inputs, dout)
    results = forward_and_backward(compiled(call, **options), inputs, dout)
    for name, result, eager in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        assert_same_bits(name, result, eager)
        assert result.stride() == eager.stride(), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dense(kernel, bf16_place, backend):
    def call(q, k, v):
        return kernel.flash_attn_func(q, k, v, causal=True, deterministic=True)

    assert_same_results(call, make_inputs(bf16_place, 2, 33, 70), backend=backend)


def test_all_terms(kernel, bf16_place):
    def call(q, k, v, alibi_slopes, s_aux, attn_bias):
        return kernel.flash_attn_func(
            q,
            k,
            v,
            causal=True,
            window_size=(20, 5),
            softcap=10.0,
            alibi_slopes=alibi_slopes,
            deterministic=True,
            s_aux=s_aux,
            attn_bias=attn_bias,
        )

    inputs = terms(bf16_place, make_inputs(bf16_place, 2, 33, 70), packed=False)
    assert_same_results(call, inputs, backend="aot_eager")


@pytest.mark.parametrize("max_seqlen", ["int", "tensor"])
def test_packed(kernel, bf16_place, max_seqlen):
    device = bf16_place["device"]

    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, longest):
        return kernel.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest, longest, causal=True, deterministic=True
        )

    inputs = make_packed(bf16_place, [33, 0, 70])
    inputs["longest"] = 70 if max_seqlen == "int" else torch.tensor(70, device=device)
    assert_same_results(call, inputs, backend="aot_eager")


def test_around_other_operations(kernel, bf16_place):
    # Inductor may hand the op intermediates of any layout, and fuse what comes before and after.
    projection = torch.randn(64, 64, **bf16_place)

    def call(q, k, v):
        q = (q @ projection).transpose(1, 2).contiguous().transpose(1, 2)
        out = kernel.flash_attn_func(q.sin(), k * 2, v, causal=True, deterministic=True)
        return out.transpose(1, 2).reshape(out.shape) + v

    inputs = make_inputs(bf16_place, 2, 33, 33, (2, 2))
    dout = random_dout(inputs)
    expected = forward_and_backward(call, inputs, dout)
    results = forward_and_backward(compiled(call), inputs, dout)
    # Inductor keeps float32 between fused operations where eager rounds: two bfloat16 steps
    for result, eager in zip(results, expected, strict=True):
        allowed = 4 * torch.finfo(torch.bfloat16).eps * eager.abs().max().item()
        assert largest_difference(result, eager) <= allowed


def test_dynamic_shapes_do_not_compile_again(kernel, bf16_place):
    def call(q, k, v):
        return kernel.flash_attn_func(q, k, v, causal=True, deterministic=True)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    dynamic = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compiled_first = 0
    for seqlen_q, seqlen_k in ((33, 70), (65, 129), (20, 50)):
        inputs = make_inputs(bf16_place, 2, seqlen_q, seqlen_k)
        assert_same_bits("out", dynamic(**inputs), call(**inputs))
        compiled_first = compiled_first or counter.frame_count
    assert counter.frame_count == compiled_first


def test_dynamic_packed_shapes_do_not_compile_again(kernel, bf16_place):
    def call(q, k, v, cu_seqlens_q, cu_seqlens_k, longest):
        return kernel.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest, longest, causal=True
        )

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    dynamic = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compiled_first = 0
    for lengths in ([33, 70], [5, 6, 80], [90, 3, 2, 40]):
        inputs = make_packed(bf16_place, lengths)
        longest = torch.tensor(max(lengths), device=bf16_place["device"])
        inputs["longest"] = longest
        assert_same_bits("out", dynamic(**inputs), call(**inputs))
        compiled_first = compiled_first or counter.frame_count
    assert counter.frame_count == compiled_first


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout(kernel, bf16_place, backend):
    inputs = make_inputs(bf16_place, 1, 64, 256, (2, 2), 8, 256)
    inputs["q"].zero_()  # equal scores and unit vectors as values: the output shows the mask
    unit = torch.eye(256, **bf16_place)[None, :, None].expand(1, 256, 2, 256)
    inputs["v"] = unit.contiguous()

    def call(q, k, v):
        return kernel.flash_attn_func(q, k, v, dropout_p=0.5, deterministic=True)

    run = compiled(call, backend=backend)
    masks = []
    for _ in range(2):
        leaves = with_gradients(inputs)
        out = run(**{name: leaves[name] for name in ("q", "k", "v")})
        (dv,) = torch.autograd.grad(out, leaves["v"], torch.ones_like(out))
        kept = (out != 0).double()
        assert abs(kept.mean().item() - 0.5) < 5 * (0.25 / kept.numel()) ** 0.5
        # the backward pass keeps what the forward pass kept; powers of two, exact in bfloat16
        assert torch.equal(dv[0, :, :, 0].double(), kept.sum(dim=1)[0].t() * 2 / 256)
        masks.append(kept)
    assert not torch.equal(*masks)


def test_check_inputs_is_seen_after_compilation(kernel, bf16_place):
    def call(q, k, v, cu_seqlens_q, cu_seqlens_k):
        return kernel.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 70, 70)

    inputs = make_packed(bf16_place, [33, 70])
    run = compiled(call, backend="aot_eager")
    run(**inputs)
    wrong = {**inputs, "cu_seqlens_q": inputs["cu_seqlens_q"].flip(0)}
    kernel.check_inputs(True)
    try:
        # In a graph, torch 2.15 makes a RuntimeError of it, whose text begins with the type.
        expected = r"^(ValueError: )?cu_seqlens_q\[0\] is 103"
        with pytest.raises((ValueError, RuntimeError), match=expected):
            run(**wrong)
    finally:
        kernel.check_inputs(False)


def test_fakes_give_the_layout_of_real_results(kernel, bf16_place):
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = make_inputs(bf16_place, 2, 9, 20, (4, 2), 12, 20)
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = kernel.flash_attn_func(**inputs, return_softmax_lse=True)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
        fake_out, fake_lse = kernel.flash_attn_func(**fakes, return_softmax_lse=True)
    for real, fake in ((out, fake_out), (lse, fake_lse)):
        assert fake.shape == real.shape
        assert fake.stride() == real.stride()
        assert fake.dtype == real.dtype
        assert fake.device == real.device
