"""Faults that users of other norm kernels reported, each with the input that showed it."""

import pytest
import torch
from errors import assert_same_bits, assert_within, assert_zero, tolerance

from . import formulas
from .comparison import check, make_inputs


def test_gradient_of_a_sandwich_of_norms(kernel, place):
    # linkedin/Liger-Kernel#370: an in-place backward overwrote what the residual still needed.
    x = torch.randn(5, 64, **place, requires_grad=True)
    w1, w2 = torch.randn(2, 64, **place)
    dout = torch.randn(5, 64, **place)

    def sandwich(norm, x, w1, w2):
        return norm(torch.tanh(norm(x, w1)), w2) + x

    (ours,) = torch.autograd.grad(sandwich(kernel.rms_norm, x, w1, w2), x, dout)

    def formula(x, weight):
        return formulas.llama(x, weight, 1e-6)

    (in_torch,) = torch.autograd.grad(sandwich(formula, x, w1, w2), x, dout)
    wide = x.detach().double().requires_grad_()
    out = sandwich(formula, wide, w1.double(), w2.double())
    (expected,) = torch.autograd.grad(out, wide, dout.double())
    assert_within("dx", ours, expected, tolerance(expected, in_torch))


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_order_of_casts(kernel, bf16_place, casting_mode):
    # linkedin/Liger-Kernel#74, huggingface/kernels-community#105: where a model rounds.
    x = torch.randint(-1, 2, (9, 256), device=bf16_place["device"]).to(torch.bfloat16)
    weight = torch.randn(256, **bf16_place) / 16
    options = {"casting_mode": casting_mode}
    if casting_mode == "gemma":
        options["weight_offset"] = 1.0
    ours = kernel.rms_norm(x, weight, 1e-6, **options)
    assert_same_bits("out", ours, formulas.rms_norm(x, weight, 1e-6, **options)[0])


def test_gradient_of_the_sum_is_added_after_the_norm(kernel, place):
    # Dao-AILab/quack#53: it was pushed through the norm.
    inputs = make_inputs(place, (8, 256), has_residual=True)
    check(kernel, "rms_norm", inputs, with_dresidual_out=True)


@pytest.mark.parametrize("hidden_size", [3, 33, 1000, 1536])
def test_variance_of_sizes_that_are_no_power_of_two(kernel, fp32_place, hidden_size):
    # linkedin/Liger-Kernel#519: lanes past the end of the row counted with minus the mean.
    inputs = make_inputs(fp32_place, (9, hidden_size), has_bias=True)
    inputs["x"] += 3
    check(kernel, "layer_norm", inputs)


@pytest.mark.parametrize(("shape", "spread", "mean"), [((5, 4), 1, 2000), ((64, 32768), 0.01, 100)])
def test_large_mean(kernel, fp32_place, shape, spread, mean):
    # pytorch/pytorch#51102: squares minus a squared mean.
    x = torch.randn(shape, **fp32_place) * spread + mean
    out = kernel.layer_norm(x, eps=0.0).double()
    assert out.mean(-1).abs().max() < 0.05
    assert (out.var(-1, unbiased=False) - 1).abs().max() < 1e-2


def test_eps_is_applied_in_float32(kernel, bf16_place):
    # pytorch/pytorch#142848: eps was rounded to the input's type.
    x = torch.full((3, 64), 1e-3, **bf16_place)
    exact = x[0, 0].double() / (x[0, 0].double() ** 2 + 1e-6).sqrt()
    assert_within("out", kernel.rms_norm(x)[0, 0], exact, 2**-8)


def test_weight_gradient_of_mixed_dtypes(kernel, bf16_place):
    # NVIDIA/apex#1652, pytorch/pytorch#167308: float32 weight under a 16-bit input.
    inputs = make_inputs(bf16_place, (4096, 512), weight_dtype=torch.float32)
    x, weight = inputs["x"], inputs["weight"].requires_grad_()
    dout = torch.randn(4096, 512, **bf16_place)
    kernel.rms_norm(x, weight, casting_mode="gemma").backward(dout)
    wide = formulas.normalize(x.double(), 1e-6) * dout.double()
    expected = wide.sum(0)
    assert weight.grad.dtype == torch.float32
    assert (weight.grad - expected).norm() <= 1e-5 * expected.norm()


def test_trained_weight_has_a_gradient(kernel, place):
    # unslothai/unsloth#4550
    check(kernel, "rms_norm", make_inputs(place, (33, 64)))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_parameter_that_is_away_between_the_passes(kernel, place, is_frozen):
    # huggingface/trl#5217: sharding empties it after each use; the recomputation gathers it again.
    whole = torch.randn(64, **place)
    weight = torch.nn.Parameter(whole.clone(), requires_grad=not is_frozen)
    x = torch.randn(5, 64, **place, requires_grad=True)
    leaves = [x] if is_frozen else [x, weight]
    expected = torch.autograd.grad(kernel.rms_norm(torch.tanh(x), weight).sum(), leaves)

    def block(x):
        weight.data = whole.clone()
        out = kernel.rms_norm(torch.tanh(x), weight)
        weight.data = whole.new_empty(0)
        return out

    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert_same_bits("gradient", leaf.grad, gradient)


def test_rows_that_fill_no_block(kernel, place):
    # BobMcDear/attorch#18: the last rows were lost from the weight's gradient.
    inputs = make_inputs(place, (1025, 32))
    check(kernel, "rms_norm", inputs)


def test_no_rows(kernel, bf16_place):
    # Dao-AILab/flash-attention#1620
    x = torch.randn(3, 0, 2520, **bf16_place, requires_grad=True)
    weight = torch.randn(2520, **bf16_place, requires_grad=True)
    kernel.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == x.shape
    assert_zero("dweight", weight.grad)


@pytest.mark.parametrize("hidden_size", [12288, 16384, 65536 + 8])
def test_hidden_sizes_above_8192(kernel, bf16_place, hidden_size):
    # Dao-AILab/flash-attention#751
    check(kernel, "rms_norm", make_inputs(bf16_place, (5, hidden_size)))


def test_heads_of_a_fused_projection(kernel, bf16_place):
    # vllm-project/vllm#24247: the row stride of a four-dimensional view was ignored.
    fused = torch.randn(4, 7, 3072, **bf16_place)
    query, key, _ = fused.split([2048, 512, 512], dim=-1)
    for x in (query.view(4, 7, 16, 128), key.view(4, 7, 4, 128)):
        check(kernel, "rms_norm", {"x": x, "weight": torch.randn(128, **bf16_place)})


@pytest.mark.parametrize("hidden_size", [3584, 3, 5, 257, 1028])
def test_alignment(kernel, place, hidden_size):
    # flashinfer-ai/flashinfer#634
    check(kernel, "rms_norm", make_inputs(place, (9, hidden_size)))


@pytest.mark.gpu
class TestMoreElementsThan32BitsCount:
    """The first, a middle and the last rows, against the same rows alone."""

    @staticmethod
    def rows_alone(function, x, weight, rows):
        for row in rows:
            x_row = x[row : row + 1].detach().clone()
            yield row, function(x_row, weight)

    @pytest.fixture(autouse=True)
    def _memory(self):
        yield
        torch.cuda.empty_cache()

    def test_forward(self, kernel):
        # linkedin/Liger-Kernel#803
        x = torch.randn(1_000_000, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        out = kernel.rms_norm(x[None], weight)[0]
        rows = [0, 1, 524_287, 524_288, 524_289, 999_999]
        for row, alone in self.rows_alone(kernel.rms_norm, x, weight, rows):
            assert_same_bits(f"row {row}", out[row : row + 1], alone)

    def test_backward(self, kernel):
        # linkedin/Liger-Kernel#803: only the last row has a gradient.
        x = torch.randn(1_000_000, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dout = torch.zeros_like(x)
        dout[-1] = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        dx, dweight = torch.autograd.grad(kernel.rms_norm(x, weight), (x, weight), dout)
        alone = x[-1:].detach().clone().requires_grad_()
        expected = torch.autograd.grad(kernel.rms_norm(alone, weight), (alone, weight), dout[-1:])
        ours = (dx[-1:], dweight)
        for name, result, wanted in zip(("dx", "dweight"), ours, expected, strict=True):
            unit = 2 * torch.finfo(torch.bfloat16).eps
            assert_within(name, result, wanted, unit * wanted.abs().max().item())
        for row in (0, 524_287, 524_288, 999_998):
            assert_zero(f"dx of row {row}", dx[row])

    def test_many_narrow_rows(self, kernel):
        # linkedin/Liger-Kernel#1483
        x = torch.zeros(2**23 + 16, 256, device="cuda", dtype=torch.bfloat16)
        x[-1] = torch.randn(256, device="cuda", dtype=torch.bfloat16)
        out = kernel.rms_norm(x)
        assert_zero("out", out[:-1])
        assert_same_bits("last row", out[-1:], kernel.rms_norm(x[-1:].clone()))

    def test_layer_norm_past_2_to_the_32(self, kernel):
        # pytorch/pytorch#181555, forward and backward
        x = torch.randn(2**20 + 8, 4096, device="cuda", dtype=torch.float16, requires_grad=True)
        dout = torch.ones_like(x)
        dout[:, ::2] = -2
        out = kernel.layer_norm(x)
        (dx,) = torch.autograd.grad(out, x, dout)
        for row in (0, 2**19 - 1, 2**19, 2**20, 2**20 + 7):
            alone = x[row : row + 1].detach().clone().requires_grad_()
            expected = kernel.layer_norm(alone)
            assert_same_bits(f"row {row}", out[row : row + 1], expected)
            (expected_dx,) = torch.autograd.grad(expected, alone, dout[row : row + 1])
            assert_same_bits(f"dx of row {row}", dx[row : row + 1], expected_dx)
