"""torch.compile, fakes, autograd registration, autocast, checkpointing, CUDA graphs and streams."""

import pytest
import torch
from errors import assert_same_bits

from .comparison import make_inputs

NORMS = ["rms_norm", "layer_norm"]


def norm_inputs(place, norm, shape=(6, 96), **options):
    return make_inputs(place, shape, has_bias=norm == "layer_norm", **options)


def op_arguments(inputs, is_layer_norm, residual_in_fp32=False, needs_residual_out=False):
    tensors = [inputs.get(name) for name in ("x", "residual", "weight", "bias")]
    mode = 1 if is_layer_norm else 0
    return (*tensors, 1e-6, 0.0, mode, is_layer_norm, residual_in_fp32, needs_residual_out)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("residual", [None, "same dtype", "kept in float32"])
def test_opcheck_of_forward(kernel, bf16_place, norm, residual):
    inputs = norm_inputs(bf16_place, norm, (2, 3, 96), has_residual=residual is not None)
    inputs["x"] = inputs["x"].transpose(0, 1)
    if residual is not None:
        inputs["residual"] = inputs["residual"].transpose(0, 1)
    for tensor in inputs.values():
        tensor.requires_grad_()
    arguments = op_arguments(
        inputs, norm == "layer_norm", residual == "kept in float32", residual is not None
    )
    torch.library.opcheck(kernel._ops.ops.norm_fwd.default, arguments)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_all", [False, True], ids=["dx only", "every gradient"])
def test_opcheck_of_backward(kernel, bf16_place, norm, with_all):
    inputs = norm_inputs(bf16_place, norm, (5, 96))
    is_layer_norm = norm == "layer_norm"
    total = inputs["x"].float() if with_all else inputs["x"]
    stats = kernel._ops.ops.norm_fwd(*op_arguments(inputs, is_layer_norm))[2]
    arguments = (
        torch.randn(5, 96, **bf16_place),
        torch.randn_like(total) if with_all else None,
        total,
        inputs["weight"],
        inputs.get("bias"),
        stats,
        0.0,
        1 if is_layer_norm else 0,
        is_layer_norm,
        with_all,
        with_all,
        with_all,
    )
    # No autograd test: the op refuses to be differentiated, on purpose.
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(kernel._ops.ops.norm_bwd.default, arguments, test_utils=utils)


def block(kernel, norm, tensors, **options):
    function = getattr(kernel, norm)
    out, residual = function(**tensors, prenorm=True, **options)
    return torch.sin(out) + residual.to(out.dtype)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("has_residual", [False, True], ids=["alone", "with residual"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(kernel, place, norm, has_residual, dynamic):
    inputs = norm_inputs(place, norm, has_residual=has_residual)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]

    def function(*tensors):
        return block(kernel, norm, dict(zip(inputs, tensors, strict=True)))

    torch._dynamo.reset()  # each case is a new function to it, of which it takes only a few
    # aot_eager traces forward and backward through the fakes, without Inductor's own rounding.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    dout = torch.randn(inputs["x"].shape, **place)
    results = []
    for run in (function, compiled):
        out = run(*leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    for name, eager, ours in zip(["out", *inputs], *results, strict=True):
        assert_same_bits(name, ours, eager)


def test_inductor(kernel, bf16_place):
    inputs = norm_inputs(bf16_place, "rms_norm")
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    compiled = torch.compile(lambda x, w: kernel.rms_norm(x * 2, w) + 1, fullgraph=True)
    eager = kernel.rms_norm(leaves[0] * 2, leaves[1]) + 1
    out = compiled(*leaves)
    assert_same_bits("out", out, eager)
    dout = torch.randn_like(eager)
    ours = torch.autograd.grad(out, leaves, dout)
    expected = torch.autograd.grad(eager, leaves, dout)
    for name, mine, theirs in zip(inputs, ours, expected, strict=True):
        assert_same_bits(name, mine, theirs)


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_keeps_the_dtype_of_x(kernel, device, norm):
    linear = torch.nn.Linear(4, 4, device=device)
    place = {"device": device, "dtype": torch.float32}
    weight = torch.randn(4, **place, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        x = linear(torch.randn(3, 4, **place))
        out = getattr(kernel, norm)(x, weight)
    assert x.dtype == out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert linear.weight.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_checkpointing(kernel, place, use_reentrant, is_frozen):
    x = torch.randn(5, 64, **place, requires_grad=True)
    weight = torch.randn(64, **place, requires_grad=not is_frozen)

    def function(x):
        return torch.sin(kernel.rms_norm(x, weight, residual=x * 2))

    dout = torch.randn(5, 64, **place)
    leaves = [x] if is_frozen else [x, weight]
    expected = torch.autograd.grad(function(x), leaves, dout)
    out = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)
    out.backward(dout)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_same_bits("gradient", leaf.grad, gradient)


def test_saved_tensors_go_through_hooks(kernel, place):
    # What shards parameters, or moves activations away, replaces the saved tensors by these hooks.
    x = torch.randn(5, 64, **place, requires_grad=True)
    weight = torch.randn(64, **place, requires_grad=True)
    dout = torch.randn(5, 64, **place)
    expected = torch.autograd.grad(kernel.rms_norm(x, weight), [x, weight], dout)
    packed = []

    def pack(tensor):
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = kernel.rms_norm(x, weight)
    assert any(torch.equal(tensor, weight) for tensor in packed if tensor.shape == weight.shape)
    for ours, theirs in zip(torch.autograd.grad(out, [x, weight], dout), expected, strict=True):
        assert_same_bits("gradient", ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(300, 128), (65, 4096), (9, 33), (20, 32768)])
def test_cuda_graph(kernel, norm, shape):
    place = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = norm_inputs(place, norm, shape, has_residual=True)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    dout = torch.randn(shape, **place)

    def run():
        out = getattr(kernel, norm)(**dict(zip(inputs, leaves, strict=True)))
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        with torch.no_grad():
            leaves[0].normal_()
            dout.normal_()
        graph.replay()
        for ours, expected in zip(captured, run(), strict=True):
            assert_same_bits("result", ours, expected)


@pytest.mark.gpu
def test_order_on_another_stream(kernel):
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Long enough that a kernel on another stream would read x before the product is in it.
        for _ in range(20):
            x = (x @ x) * 1e-3
        ours = kernel.rms_norm(x, weight)
    stream.synchronize()
    assert_same_bits("out", ours, kernel.rms_norm(x, weight))


@pytest.mark.gpu
def test_chain_of_dependent_norms(kernel):
    # Each starts while the one before ends, and has to wait for its result.
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        chained = x
        for _ in range(6):
            chained = kernel.rms_norm(chained, weight) * 1
        stepwise = x
        for _ in range(6):
            stepwise = kernel.rms_norm(stepwise, weight)
            torch.cuda.synchronize()
        assert_same_bits("out", chained, stepwise)


@pytest.mark.gpu
def test_second_device(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = torch.randn(65, 1024, device="cuda:0", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda:0", dtype=torch.bfloat16)
    expected = kernel.rms_norm(x, weight)
    ours = kernel.rms_norm(x.to("cuda:1"), weight.to("cuda:1"))
    assert ours.device.index == 1
    assert torch.cuda.current_device() == 0
    assert_same_bits("out", ours.to("cuda:0"), expected)
