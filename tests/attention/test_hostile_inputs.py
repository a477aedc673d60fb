"""Arguments of wrong types, layouts and kinds: the right result, or an error that names them."""

import math
import re
import threading

import pytest
import reference
import torch
from torch.autograd import forward_ad

from .comparison import cumulative, make_inputs, make_packed, run_ours

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
PACKED_INPUTS = ("cu_seqlens_q", "cu_seqlens_k")


@pytest.fixture
def inputs():
    return make_inputs(CPU, 2, 5, 7, (4, 2), 16)


@pytest.fixture
def packed_inputs():
    packed = make_packed(CPU, [3, 2], [4, 3], (4, 2), 16)
    return {**packed, "max_seqlen_q": 3, "max_seqlen_k": 4}


def refused(message, function, *arguments, error=ValueError, **options):
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments, **options)


NO_NUMBERS = [None, "x", 1j, [0.5], torch.tensor([0.5, 0.2]), torch.tensor(0.5, device="meta")]


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_what_is_no_number(kernel, inputs, name, value):
    if name == "softmax_scale" and value is None:
        return  # the default
    refused(f"{name} is", kernel.flash_attn_func, **inputs, **{name: value})


BOOLS = [True, False, torch.tensor(True)]


@pytest.mark.parametrize("value", BOOLS, ids=str)
def test_a_bool_is_no_number(kernel, inputs, packed_inputs, value):
    """A flag in another argument's place, as in flash_attn_func(q, k, v, True)."""
    for name in ("softmax_scale", "softcap", "dropout_p"):
        refused(f"{name} is", kernel.flash_attn_func, **inputs, **{name: value})
    for window in ((value, 0), (0, value)):
        refused("window_size[", kernel.flash_attn_func, **inputs, window_size=window)
    if isinstance(value, bool):
        for name in ("max_seqlen_q", "max_seqlen_k"):
            refused(f"{name} is", kernel.flash_attn_varlen_func, **{**packed_inputs, name: value})
    q, k, v = inputs.values()
    refused("dropout_p is", kernel.flash_attn_func, q, k, v, value)
    refused("num_splits is", kernel.flash_attn_with_kvcache, q, k, v, num_splits=value)
    refused("cache_seqlens is", kernel.flash_attn_with_kvcache, q, k, v, cache_seqlens=value)
    for norm in (kernel.rms_norm, kernel.layer_norm):
        refused("eps is", norm, q, eps=value)
    refused("weight_offset is", kernel.rms_norm, q, q[0, 0, 0], weight_offset=value)
    for name in ("window_size_left", "window_size_right"):
        window = {"window_size_left": -1, "window_size_right": -1, name: value}
        forward = kernel._flash_attn_forward
        refused(
            f"{name} is",
            forward,
            q,
            k,
            v,
            0.0,
            1.0,
            False,
            **window,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_scalars_that_want_a_gradient(kernel, inputs, name):
    learned = torch.tensor(0.5, requires_grad=True)
    message = f"{name} is a tensor that requires a gradient"
    refused(message, kernel.flash_attn_func, **inputs, **{name: learned})


def test_numbers_of_other_types(kernel, inputs):
    np = pytest.importorskip("numpy")
    expected = kernel.flash_attn_func(**inputs, softmax_scale=0.5, window_size=(2, 1))
    for half in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        for window in ([2, 1], (np.int64(2), np.int32(1)), torch.tensor([2, 1])):
            out = kernel.flash_attn_func(**inputs, softmax_scale=half, window_size=window)
            assert torch.equal(out, expected)


WRONG_WINDOWS = [None, 3, "ab", (1.0, 2.0), (None, None), {1: 2, 3: 4}, torch.tensor(1), ()]


@pytest.mark.parametrize("window_size", WRONG_WINDOWS, ids=str)
def test_what_is_no_window(kernel, inputs, window_size):
    refused("window_size", kernel.flash_attn_func, **inputs, window_size=window_size)


@pytest.mark.parametrize("bound", [2**31, 2**40, 2**63 - 1, 2**63, 2**70])
def test_windows_beyond_all_keys(kernel, inputs, bound):
    both = kernel.flash_attn_func(**inputs, window_size=(bound, bound))
    assert torch.equal(both, kernel.flash_attn_func(**inputs))
    left = kernel.flash_attn_func(**inputs, window_size=(bound, 0))
    assert torch.equal(left, kernel.flash_attn_func(**inputs, causal=True))
    refused("window_size is (-", kernel.flash_attn_func, **inputs, window_size=(-bound, 0))


FLAGS = ["causal", "deterministic", "return_attn_probs", "return_softmax_lse"]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", 0.5, torch.tensor([True, False])], ids=str)
def test_what_is_no_flag(kernel, inputs, name, value):
    refused(f"{name} is", kernel.flash_attn_func, **inputs, **{name: value})
    pages = {name: tensor[:1] for name, tensor in inputs.items()}
    packed = (pages["q"][0], pages["k"], pages["v"], *[torch.tensor([0, 5]).int()] * 2, 5, 5)
    table = torch.zeros(1, 1, dtype=torch.int32)
    refused(
        f"{name} is", kernel.flash_attn_varlen_func, *packed, block_table=table, **{name: value}
    )


def test_check_inputs_takes_flags_only(kernel):
    refused("enabled is 'yes'", kernel.check_inputs, "yes")


TENSORS = ["q", "k", "v", "alibi_slopes", "s_aux", "attn_bias"]


@pytest.mark.parametrize("name", TENSORS)
def test_what_is_no_tensor(kernel, inputs, name):
    for value in (None,) * (name in "qkv") + (1.0, [1.0], "x", False):
        refused(f"{name} is {value!r}", kernel.flash_attn_func, **{**inputs, name: value})


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_layouts(kernel, inputs, name):
    dense = inputs.get(name, torch.ones(4))
    for value in (dense.to_sparse(), dense.to_mkldnn()):
        refused(f"{name} has layout", kernel.flash_attn_func, **{**inputs, name: value})
    nested = torch.nested.nested_tensor([dense, dense])
    refused(f"{name} is a nested", kernel.flash_attn_func, **{**inputs, name: nested})
    quantized = torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)
    refused(f"{name} is quantized", kernel.flash_attn_func, **{**inputs, name: quantized})


def test_packed_tensors_that_are_none(kernel, inputs):
    index = cumulative([5], "cpu")
    q = inputs["q"]
    for value in (None, [1.0]):
        refused(f"qkv is {value!r}", kernel.flash_attn_qkvpacked_func, value)
        refused(f"kv is {value!r}", kernel.flash_attn_kvpacked_func, q, value)
        refused(f"qkv is {value!r}", kernel.flash_attn_varlen_qkvpacked_func, value, index, 5)
        refused(
            f"kv is {value!r}",
            kernel.flash_attn_varlen_kvpacked_func,
            q[0],
            value,
            index,
            index,
            5,
            5,
        )


@pytest.mark.parametrize("name", PACKED_INPUTS)
def test_index_tensors(kernel, packed_inputs, name):
    good = packed_inputs[name]
    for value, message in [
        (good.to_sparse(), f"{name} has layout"),
        (good.tolist(), f"{name} is ["),
        (good[:1].expand(3), f"{name} is not contiguous"),
        (good.to("meta"), f"{name} is on meta"),
        (torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32), "decreases at index 2"),
    ]:
        refused(message, kernel.flash_attn_varlen_func, **{**packed_inputs, name: value})


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("value", [1.5, math.nan, "3", [3], -1], ids=str)
def test_max_seqlen(kernel, packed_inputs, name, value):
    refused(f"{name} is", kernel.flash_attn_varlen_func, **{**packed_inputs, name: value})


def test_more_heads_than_an_int_holds(kernel):
    one = torch.zeros(1)
    q, k = one.expand(1, 0, 2**32, 8), one.expand(1, 0, 2, 8)
    refused("q has 4294967296 heads", kernel.flash_attn_func, q, k, k)


@pytest.mark.parametrize("name", ["q", "k", "v", "s_aux", "attn_bias"])
def test_forward_mode(kernel, inputs, name):
    inputs.update(s_aux=torch.ones(4), attn_bias=torch.ones(1, 1, 5, 7))
    message = f"{name} carries a forward-mode tangent"
    for needs_gradient in (False, True):
        with forward_ad.dual_level():
            primal = inputs[name].clone().requires_grad_(needs_gradient)
            dual = forward_ad.make_dual(primal, torch.ones_like(primal))
            call = {**inputs, name: dual}
            refused(message, kernel.flash_attn_func, **call, error=NotImplementedError)

    def of_one(tensor):
        return kernel.flash_attn_func(**{**inputs, name: tensor})

    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(of_one, (inputs[name],), (torch.ones_like(inputs[name]),))


def test_vmap(kernel, inputs):
    q = torch.randn(3, *inputs["q"].shape, requires_grad=True)
    k, v = inputs["k"], inputs["v"]
    out = torch.func.vmap(lambda x: kernel.flash_attn_func(x, k, v))(q)
    expected = torch.stack([kernel.flash_attn_func(x, k, v) for x in q])
    torch.testing.assert_close(out, expected)
    (dq,) = torch.autograd.grad(out.sum(), q)
    torch.testing.assert_close(dq, torch.autograd.grad(expected.sum(), q)[0])


def test_function_transforms(kernel, inputs):
    k, v = inputs["k"], inputs["v"]
    batch = torch.randn(3, *inputs["q"].shape)

    def loss(q):
        return kernel.flash_attn_func(q, k, v).square().sum()

    expected = torch.stack([torch.autograd.grad(loss(x.requires_grad_()), x)[0] for x in batch])
    torch.testing.assert_close(torch.func.grad(loss)(batch[0].detach()), expected[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(batch.detach()), expected)
    torch.testing.assert_close(
        torch.func.grad(lambda q: torch.func.vmap(loss)(q).sum())(batch.detach()), expected
    )
    _, pull_back = torch.func.vjp(loss, batch[1].detach())
    torch.testing.assert_close(pull_back(torch.tensor(1.0))[0], expected[1])
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(batch[0].detach())


def test_tensors_with_a_negative_bit(kernel, inputs):
    q = torch.randn(2, 5, 4, 16, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    out = kernel.flash_attn_func(q, inputs["k"], inputs["v"])
    assert torch.equal(out, kernel.flash_attn_func(q.resolve_neg(), inputs["k"], inputs["v"]))


VIEWS = {
    "no batch stride": lambda x: x[:1].expand(x.shape),
    "no row stride": lambda x: x[:, :1].expand(x.shape),
    "no head stride": lambda x: x[:, :, :1].expand(x.shape),
    "no strides": lambda x: torch.tensor(0.3).expand(x.shape),
    "all permuted": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "overlapping": lambda x: torch.randn(1100).as_strided(x.shape, (500, 3, 1, 1)),
    "an odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strange_strides(kernel, inputs, name):
    views = {key: VIEWS[name](tensor) for key, tensor in inputs.items()}
    copies = {key: tensor.clone().contiguous() for key, tensor in views.items()}
    dout = torch.randn(2, 5, 4, 16)
    ours = run_ours(kernel, views, dout, causal=True)
    expected = run_ours(kernel, copies, dout, causal=True)
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key


def test_memory_that_is_not_aligned_to_elements(kernel, inputs):
    memory = bytearray(inputs["q"].numel() * 4 + 1)
    q = torch.frombuffer(memory, dtype=torch.float32, offset=1).view_as(inputs["q"])
    q.copy_(inputs["q"])
    out = kernel.flash_attn_func(q, inputs["k"], inputs["v"])
    assert torch.equal(out, kernel.flash_attn_func(**inputs))


SPECIAL = {
    "NaN in a query": ("q", (0, 1), math.nan),
    "infinity in a query": ("q", (0, 1, 0, 0), math.inf),
    "infinity in a key": ("k", (0, 1, 0, 0), math.inf),
    "minus infinity in a key": ("k", (0, 1, 0), -math.inf),
    "infinity in a value": ("v", (0, 1, 0, 0), math.inf),
    "queries of 0": ("q", (), 0.0),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values(kernel, inputs, case):
    name, place, value = SPECIAL[case]
    inputs[name][place] = value
    out = kernel.flash_attn_func(**inputs)
    wide = {key: tensor.double() for key, tensor in inputs.items()}
    expected, _ = reference.attention(**wide)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_second_use_of_a_graph(kernel, inputs):
    q = inputs["q"].requires_grad_()
    total = kernel.flash_attn_func(**inputs).square().sum()
    (first,) = torch.autograd.grad(total, q, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(total, q)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, q)


@pytest.mark.parametrize("changed", ["k", "out", "softmax_lse"])
def test_inplace_changes_before_the_backward_pass(kernel, inputs, changed):
    inputs["q"].requires_grad_()
    out, softmax_lse = kernel.flash_attn_func(**inputs, return_softmax_lse=True)
    total = out.sum()
    {"k": inputs["k"], "out": out.detach(), "softmax_lse": softmax_lse.detach()}[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_inference_mode(kernel, inputs):
    with torch.inference_mode():
        out = kernel.flash_attn_func(**inputs)
    assert torch.equal(out, kernel.flash_attn_func(**inputs))


def test_numbers_of_threads(kernel, inputs):
    before = torch.get_num_threads()
    expected = run_ours(kernel, inputs)
    try:
        for count in (1, 3, 64):
            torch.set_num_threads(count)
            ours = run_ours(kernel, inputs)
            for name, value in expected.items():
                torch.testing.assert_close(ours[name], value)
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_threads(kernel, inputs):
    expected = kernel.flash_attn_func(**inputs)
    results = []

    def call():
        for _ in range(5):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
            out = kernel.flash_attn_func(**leaves)
            out.sum().backward()
            refused("rows", kernel.flash_attn_func, **{**inputs, "v": inputs["v"][:, :3]})
            results.append(torch.equal(out, expected))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def private_backward(inputs, **changes):
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    return {
        "dout": torch.ones_like(q),
        "q": q,
        "k": k,
        "v": v,
        "out": torch.ones_like(q),
        "softmax_lse": torch.zeros(2, 4, 5),
        "dq": torch.zeros_like(q),
        "dk": torch.zeros_like(k),
        "dv": torch.zeros_like(v),
        "dropout_p": 0.0,
        "softmax_scale": 0.25,
        "causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        **changes,
    }


WRONG_PRIVATE = [
    ({"dq": torch.zeros(3, 2, 5, 4, 16)}, "dq has shape (3, 2, 5, 4, 16)"),
    ({"dk": [0.0]}, "dk is [0.0]"),
    ({"dout": None}, "dout is None"),
    ({"softmax_scale": None}, "softmax_scale is None"),
    ({"window_size_left": 0.5}, "window_size_left is 0.5"),
    ({"dropout_p": 0.5}, "rng_state is missing"),
    ({"out": torch.zeros(2, 5, 4, 8)}, "out has shape (2, 5, 4, 8)"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_PRIVATE, ids=lambda x: str(x)[:20])
def test_private_backward(kernel, inputs, changes, message):
    refused(message, kernel._flash_attn_backward, **private_backward(inputs, **changes))


def test_private_forward(kernel, inputs, packed_inputs):
    tensors = (inputs["q"], inputs["k"], inputs["v"])
    options = (False, -1, -1, 0.0, None, False)
    refused("softmax_scale is None", kernel._flash_attn_forward, *tensors, 0.0, None, *options)
    refused("dropout_p is None", kernel._flash_attn_forward, *tensors, None, 0.25, *options)
    packed_inputs.update(cu_seqlens_q=None, dropout_p=0.0, softmax_scale=0.25, causal=False)
    refused("cu_seqlens_q is None", kernel._flash_attn_varlen_forward, **packed_inputs)
