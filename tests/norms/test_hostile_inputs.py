"""Arguments of wrong types, layouts and kinds: the right result, or an error that names them."""

import math
import re
import threading

import pytest
import torch
from torch.autograd import forward_ad


@pytest.fixture(params=["rms_norm", "layer_norm"])
def norm(request, kernel):
    return getattr(kernel, request.param)


def refused(message, function, *arguments, error=ValueError, **options):
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments, **options)


NO_NUMBERS = [None, "x", 1j, [1e-6], torch.tensor([1e-6, 1.0]), torch.tensor(1e-6, device="meta")]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_what_is_no_number(kernel, norm, value):
    x = torch.randn(3, 8)
    refused("eps is", norm, x, eps=value)
    refused("weight_offset is", kernel.rms_norm, x, torch.ones(8), weight_offset=value)


def test_scalars_that_want_a_gradient(kernel, norm):
    x, learned = torch.randn(3, 8), torch.tensor(1e-6, requires_grad=True)
    refused("eps is a tensor that requires a gradient", norm, x, eps=learned)
    message = "weight_offset is a tensor that requires a gradient"
    refused(message, kernel.rms_norm, x, torch.ones(8), weight_offset=learned)


def test_numbers_beyond_float32(kernel, norm):
    x = torch.randn(3, 8)
    refused("eps is 1e+300", norm, x, eps=1e300)
    refused("weight_offset is 1e+300", kernel.rms_norm, x, torch.ones(8), weight_offset=1e300)


@pytest.mark.parametrize("value", ["yes", 0.5, torch.tensor([True, False])], ids=str)
def test_what_is_no_flag(norm, value):
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    refused("prenorm is", norm, x, prenorm=value)
    refused("residual_in_fp32 is", norm, x, residual_in_fp32=value)


@pytest.mark.parametrize("value", [None, 0, [], {}, ("llama",)], ids=str)
def test_what_is_no_casting_mode(kernel, value):
    message = f"casting_mode is {value!r}"
    refused(message, kernel.rms_norm, torch.randn(3, 8), casting_mode=value)


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_dense_tensor(kernel, name):
    good = {"x": torch.randn(3, 8)}
    for value in (None,) * (name == "x") + (1.0, [1.0], "x"):
        refused(f"{name} is {value!r}", kernel.layer_norm, **{**good, name: value})
    dense = torch.randn(3, 8)
    for value in (dense.to_sparse(), dense.to_mkldnn()):
        refused(f"{name} has layout", kernel.layer_norm, **{**good, name: value})
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([dense, dense[:2]], layout=layout)
        refused(f"{name} is a nested", kernel.layer_norm, **{**good, name: nested})
    quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    refused(f"{name} is quantized", kernel.layer_norm, **{**good, name: quantized})


@pytest.mark.parametrize("name", ["x", "residual", "weight", "bias"])
def test_forward_mode(kernel, name):
    good = {"x": torch.randn(3, 8), "residual": torch.randn(3, 8)}
    good.update(weight=torch.randn(8), bias=torch.randn(8))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(good[name], torch.ones_like(good[name]))
        message = f"{name} carries a forward-mode tangent"
        refused(message, kernel.layer_norm, **{**good, name: dual}, error=NotImplementedError)


def test_vmap(norm):
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))


def test_function_transforms(norm):
    batch, weight = torch.randn(3, 2, 8), torch.randn(8)

    def loss(x):
        return norm(x, weight).pow(3).sum()

    expected = torch.stack([torch.autograd.grad(loss(x.requires_grad_()), x)[0] for x in batch])
    torch.testing.assert_close(torch.func.grad(loss)(batch[0].detach()), expected[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batch.detach()), expected)
    torch.testing.assert_close(
        torch.func.grad(lambda x: torch.func.vmap(loss)(x).sum())(batch.detach()), expected
    )
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(batch[0].detach())


def test_gradient_of_a_mapped_sum(norm):
    """The sum with the residual is kept for the backward pass here too."""
    x, residual = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8)

    def loss(x, residual):
        return norm(x, residual=residual).pow(3).sum()

    expected = torch.autograd.grad(loss(x, residual), x)[0]
    ours = torch.func.grad(lambda x: torch.func.vmap(loss)(x, residual).sum())(x.detach())
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_outside_of_vmap(norm, dtype, compiled):
    # Inside of a compiled vmap nothing says that the sum is needed for a backward pass.
    x, residual = (torch.randn(3, 2, 8).to(dtype).requires_grad_() for _ in range(2))
    expected = torch.autograd.grad(norm(x, residual=residual).pow(3).sum(), (x, residual))

    def mapped(x, residual):
        return torch.func.vmap(lambda x, residual: norm(x, residual=residual))(x, residual)

    run = torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped
    gradients = torch.autograd.grad(run(x, residual).pow(3).sum(), (x, residual))
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_outside_of_vmap_with_a_sum_in_float32(norm, compiled):
    x = torch.randn(3, 2, 8).bfloat16().requires_grad_()
    (expected,) = torch.autograd.grad(norm(x, residual_in_fp32=True).float().pow(3).sum(), x)

    def mapped(x):
        return torch.func.vmap(lambda x: norm(x, residual_in_fp32=True))(x)

    run = torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped
    torch.testing.assert_close(torch.autograd.grad(run(x).float().pow(3).sum(), x)[0], expected)


def test_tensors_with_a_negative_bit(norm):
    x = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(norm(x, x[0]), norm(x.resolve_neg(), x[0].resolve_neg()))


def test_memory_that_is_not_aligned_to_elements(norm):
    x = torch.randn(3, 8)
    shifted = torch.frombuffer(bytearray(97), dtype=torch.float32, offset=1).view(3, 8)
    shifted.copy_(x)
    assert torch.equal(norm(shifted), norm(x))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (1,), (1,) * 7 + (8,), (2,) * 9], ids=str)
def test_shapes(norm, shape):
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape[-1], requires_grad=True)
    out = norm(x, weight)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape
    assert weight.grad.isfinite().all()
    if x.numel() == 0:
        assert (weight.grad == 0).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e-30, 0.0])
def test_special_values_stay_in_their_row(kernel, value):
    x = torch.randn(3, 8)
    x[1, 1:] = value
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    out = kernel.rms_norm(x).double()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    expected = torch.nn.functional.layer_norm(wide, (8,))
    out = kernel.layer_norm(x).double()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_calls_from_several_threads(norm):
    x = torch.randn(5, 64)
    expected = norm(x)
    results = []

    def call():
        for _ in range(5):
            leaf = x.clone().requires_grad_()
            out = norm(leaf)
            out.sum().backward()
            refused("weight has shape", norm, x, x)
            results.append(torch.equal(out, expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


@pytest.mark.gpu
def test_no_call_waits_for_the_device(norm):
    x = torch.randn(5, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, device="cuda", requires_grad=True)
    residual, dout = torch.randn(2, 5, 64, device="cuda").unbind()
    torch.autograd.grad(norm(x, weight, residual=residual), (x, weight), dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(norm(x, weight, residual=residual), (x, weight), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
