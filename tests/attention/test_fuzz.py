"""Random shapes, strides, terms and flags together, forward and backward, against the reference.

Hypothesis chooses the cases, the same ones in every run of the same sources (``derandomize``): it
also draws constants that it finds in the package and in other modules outside of site-packages, so
that a change there may change the cases. The smallest case that fails is printed, and
``run_case(kernel, device, case)`` repeats it.
"""

import math

import pytest
import reference
import torch
from errors import assert_within, assert_zero, poisoned_memory, surrounded_by_nan

pytest.importorskip("hypothesis", reason="not needed to use the kernels: requirements/test.txt")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .comparison import (
    allowed_errors,
    check_layout,
    gradients,
    longest,
    make_inputs,
    make_packed,
    random_dlse,
    random_dout,
    run_formula,
    with_gradients,
)
from .test_dropout import drawn_state

FIXED = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def lengths(most):
    """Sizes around those that tiles have, and any."""
    edges = [n for n in (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129) if n <= most]
    return st.one_of(st.sampled_from(edges), st.integers(0, most))


def head_dims(most):
    edges = [n for n in (1, 8, 40, 64, 72, 96, 104, 128, 160, 192, 256, 512) if n <= most]
    return st.one_of(st.sampled_from(edges), st.integers(1, min(most, 136)))


def cases(dtypes, most_rows, most_head_dim):
    """Flat dicts of numbers and names, from which run_case() makes the tensors."""
    bound = st.one_of(st.just(-1), st.integers(0, 2 * most_rows))
    shapes = {
        "dtype": st.sampled_from(dtypes),
        "packed": st.booleans(),
        "sequences": st.lists(
            st.tuples(lengths(most_rows), lengths(most_rows)), min_size=1, max_size=4
        ),
        "dense": st.tuples(st.integers(0, 3), lengths(most_rows), lengths(most_rows)),
        "more_rows": st.sampled_from([0, 0, 3]),
        "num_heads_kv": st.integers(1, 3),
        "group_size": st.sampled_from([1, 1, 2, 3, 4, 7, 8]),
        "head_dim": head_dims(most_head_dim),
        "head_dim_v": st.one_of(st.none(), head_dims(most_head_dim)),
        "layouts": st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
        "seed": st.integers(0, 2**31),
    }
    flags = {
        "causal": st.booleans(),
        "window_size": st.one_of(st.just((-1, -1)), st.tuples(bound, bound)),
        "softmax_scale": st.sampled_from([None, None, None, 0.3, 1.0, 0.0, -0.2]),
        "softcap": st.sampled_from([0.0, 0.0, 2.0, 30.0]),
        "dropout_p": st.sampled_from([0.0, 0.0, 0.0, 0.2, 0.7]),
        "deterministic": st.booleans(),
        "alibi": st.sampled_from([None, None, "heads", "batch"]),
        "s_aux": st.sampled_from([None, None, "own", "float32"]),
        "bias": st.sampled_from([None, "own", "float32"]),
        "bias_broadcast": st.tuples(st.booleans(), st.booleans(), st.booleans()),
        "bias_hides": st.sampled_from([0.0, 0.0, 0.3]),
        "bias_layout": st.sampled_from(sorted(LAYOUTS)),
        "dlse": st.booleans(),
    }
    return st.fixed_dictionaries({**shapes, **flags})


LAYOUTS = {
    "contiguous": lambda x: x,
    "gaps": surrounded_by_nan,
    "rows last": lambda x: x.transpose(-3, -1).contiguous().transpose(-3, -1),
    "heads first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def make_case(device, case) -> tuple[dict, dict]:
    """The inputs, and the options that go to kernel and formula alike."""
    place = {"device": device, "dtype": getattr(torch, case["dtype"])}
    num_heads_q = case["num_heads_kv"] * case["group_size"]
    heads = (num_heads_q, case["num_heads_kv"])
    dims = (heads, case["head_dim"], case["head_dim_v"])
    if case["packed"]:
        lengths_q, lengths_k = zip(*case["sequences"], strict=True)
        inputs = make_packed(place, lengths_q, lengths_k, *dims, case["more_rows"])
    else:
        inputs = make_inputs(place, *case["dense"], *dims)
    for name, layout in zip("qkv", case["layouts"], strict=True):
        inputs[name] = LAYOUTS[layout](inputs[name])
    batch_size = len(case["sequences"]) if case["packed"] else case["dense"][0]
    if case["alibi"] is not None:
        shape = (batch_size, num_heads_q) if case["alibi"] == "batch" else (num_heads_q,)
        inputs["alibi_slopes"] = torch.rand(shape, device=device)
    if case["s_aux"] is not None:
        dtype = torch.float32 if case["s_aux"] == "float32" else place["dtype"]
        inputs["s_aux"] = torch.randn(num_heads_q, device=device, dtype=dtype)
    if case["bias"] is not None:
        inputs["attn_bias"] = make_bias(case, inputs, batch_size, num_heads_q)
    names = ("causal", "window_size", "softmax_scale", "softcap", "dropout_p")
    return inputs, {name: case[name] for name in names}


def make_bias(case, inputs, batch_size, num_heads_q) -> torch.Tensor:
    q, k = inputs["q"], inputs["k"]
    if case["packed"]:
        full = (num_heads_q, q.shape[0], longest(inputs["cu_seqlens_k"]) + case["more_rows"])
        broadcast = case["bias_broadcast"][1:]
    else:
        full = (batch_size, num_heads_q, q.shape[1], k.shape[1])
        broadcast = case["bias_broadcast"]
    shape = [1 if one else size for size, one in zip(full, broadcast, strict=False)]
    shape.append(full[-1])
    bias = torch.randn(shape, device=q.device, dtype=q.dtype) * case.get("bias_scale", 1.0)
    bias[torch.rand(shape, device=q.device) < case["bias_hides"]] = -math.inf
    bias = bias.float() if case["bias"] == "float32" else bias
    return LAYOUTS[case["bias_layout"]](bias)


def keep_masks(case, inputs, state):
    """As the reference takes them: dense one tensor, packed one for each sequence."""
    num_heads_q = inputs["q"].shape[-2]
    device = inputs["q"].device
    sizes = case["sequences"] if case["packed"] else [case["dense"][1:]] * case["dense"][0]
    masks = [
        reference.dropout_keep(state, case["dropout_p"], index, num_heads_q, *size).to(device)
        for index, size in enumerate(sizes)
    ]
    if case["packed"]:
        return masks
    empty = torch.ones(0, num_heads_q, *case["dense"][1:], device=device)
    return torch.stack(masks) if masks else empty


def run_case(kernel, device, case) -> None:
    torch.manual_seed(case["seed"])
    inputs, options = make_case(device, case)
    dout = random_dout(inputs)
    dsoftmax_lse = random_dlse(inputs) if case["dlse"] else None
    formula_options = {**options, "dout": dout, "dsoftmax_lse": dsoftmax_lse}
    if case["dropout_p"] > 0:
        state = drawn_state({"device": device}).tolist()
        formula_options["dropout_keep"] = keep_masks(case, inputs, state)

    leaves = with_gradients(inputs)
    options.update(deterministic=case["deterministic"], return_softmax_lse=True)
    with poisoned_memory():
        if case["packed"]:
            longest_q, longest_k = (longest(inputs[f"cu_seqlens_{x}"]) for x in "qk")
            out, softmax_lse = kernel.flash_attn_varlen_func(
                **leaves, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options
            )
        else:
            out, softmax_lse = kernel.flash_attn_func(**leaves, **options)
        found = gradients(leaves, out, softmax_lse, dout, dsoftmax_lse)
    ours = {"out": out.detach(), "softmax_lse": softmax_lse.detach(), **found}

    expected = run_formula(inputs, dtype=torch.float64, **formula_options)
    allowed = allowed_errors(inputs, expected, **formula_options)
    for name, reference_value in expected.items():
        assert_within(name, ours[name], reference_value, allowed[name])
    check_layout(inputs, ours)


@settings(max_examples=200, **FIXED)
@given(case=cases(["float32", "bfloat16", "float16"], most_rows=140, most_head_dim=256))
def test_on_the_cpu(kernel, case):
    run_case(kernel, torch.device("cpu"), case)


@pytest.mark.gpu
@settings(max_examples=150, **FIXED)
@given(case=cases(["bfloat16", "float16"], most_rows=300, most_head_dim=512))
def test_on_a_gpu(kernel, case):
    run_case(kernel, torch.device("cuda"), case)


ONE_KEY = {
    "dtype": "bfloat16",
    "packed": False,
    "sequences": [(0, 0)],
    "dense": (1, 1, 1),
    "more_rows": 0,
    "num_heads_kv": 1,
    "group_size": 1,
    "head_dim": 1,
    "head_dim_v": None,
    "layouts": ("contiguous", "contiguous", "contiguous"),
    "seed": 0,
    "causal": False,
    "window_size": (-1, -1),
    "softmax_scale": None,
    "softcap": 0.0,
    "dropout_p": 0.2,
    "deterministic": False,
    "alibi": None,
    "s_aux": None,
    "bias": None,
    "bias_broadcast": (False, False, False),
    "bias_hides": 0.0,
    "bias_layout": "contiguous",
    "dlse": False,
}


def test_gradients_of_one_key(kernel, device):
    """dq and dk are 0 in exact arithmetic and in torch: ``out``, in 16 bits, must not leave more of
    its rounding in delta than the tolerance has room for."""
    for seed in range(20):
        run_case(kernel, device, {**ONE_KEY, "seed": seed})


def test_gradients_of_one_key_beside_a_sink(kernel, device):
    """A sink takes a part of the weight, so ``out`` is not v and is rounded; delta must not have
    that rounding, a few times what torch's formula happens to leave."""
    for seed in (1143, *range(200)):
        run_case(kernel, device, {**ONE_KEY, "seed": seed, "dropout_p": 0.0, "s_aux": "own"})


def test_gradients_of_one_key_beside_a_sink_in_many_columns(kernel, device):
    beside_a_sink = {**ONE_KEY, "head_dim": 64, "dropout_p": 0.0, "s_aux": "own"}
    for seed in range(150):
        run_case(kernel, device, {**beside_a_sink, "seed": seed})


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", [(1, 96), (64, 64), (200, 72)], ids=str)
def test_rows_of_one_key_have_no_gradient(kernel, device, dims, dtype, dropout_p):
    """dP - delta is 0 to the last bit, whatever is multiplied with it and summed over the rows."""
    place = {"device": device, "dtype": getattr(torch, dtype)}
    inputs = make_inputs(place, 2, 127, 1, (4, 2), *dims)
    inputs["attn_bias"] = 100 * torch.randn(2, 4, 127, 1, **place)
    leaves = with_gradients(inputs)
    out = kernel.flash_attn_func(**leaves, dropout_p=dropout_p, softmax_scale=1000.0)
    found = gradients(leaves, out, None, 100 * random_dout(inputs), None)
    for name in ("dq", "dk", "dattn_bias"):
        assert_zero(name, found[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_keys_that_are_equal(kernel, device, dtype, packed):
    """dscore sums up to 0 over a row, so dq is 0 but for rounding, and torch's is exactly 0."""
    for seed in range(10):
        torch.manual_seed(seed)
        place = {"device": device, "dtype": getattr(torch, dtype)}
        if packed:
            inputs = make_packed(place, [17, 3, 9], [2, 17, 5], heads=(4, 2), head_dim=64)
        else:
            inputs = make_inputs(place, 3, 17, 2 + seed, (4, 2), 64)
        one = inputs["k"][..., :1, :, :]
        inputs["k"] = one.expand_as(inputs["k"]).contiguous()
        dout = random_dout(inputs)
        leaves = with_gradients(inputs)
        if packed:
            lengths = {f"max_seqlen_{x}": longest(inputs[f"cu_seqlens_{x}"]) for x in "qk"}
            out = kernel.flash_attn_varlen_func(**leaves, **lengths)
        else:
            out = kernel.flash_attn_func(**leaves)
        out.backward(dout)
        expected = run_formula(inputs, dtype=torch.float64, dout=dout)
        allowed = allowed_errors(inputs, expected, dout=dout)
        assert_within("dq", leaves["q"].grad, expected["dq"], allowed["dq"])


@st.composite
def almost_one_key(draw, most_rows, wants_dlse):
    """Dropout where rows have one to three keys, or many of which one has all the weight."""
    case = dict(ONE_KEY)
    few = st.integers(1, 3)
    keys = draw(few | st.sampled_from([17, 64, 65, 130]))
    biases = ["own", "float32"] if keys > 3 else [None, "own", "float32"]
    case |= {
        "dtype": draw(st.sampled_from(["bfloat16", "float16"])),
        "packed": draw(st.booleans()),
        "dense": (draw(few), draw(st.integers(1, most_rows)), keys),
        "num_heads_kv": draw(few),
        "group_size": draw(st.sampled_from([1, 1, 2, 4])),
        "head_dim": draw(head_dims(256)),
        "seed": draw(st.integers(0, 2**31)),
        "causal": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.1, 0.2, 0.7])),
        "deterministic": draw(st.booleans()),
        "s_aux": draw(st.sampled_from([None, None, "float32"])),
        "bias": draw(st.sampled_from(biases)),
        "bias_scale": 100.0,
        "dlse": draw(wants_dlse),
    }
    case["sequences"] = [case["dense"][1:]] * case["dense"][0]
    return case


@settings(max_examples=100, **FIXED)
@given(case=almost_one_key(20, wants_dlse=st.just(False)))
def test_almost_one_key_on_the_cpu(kernel, case):
    run_case(kernel, torch.device("cpu"), case)


@settings(max_examples=100, **FIXED)
@given(case=almost_one_key(20, wants_dlse=st.booleans()))
def test_almost_one_key_with_a_gradient_of_lse_on_the_cpu(kernel, case):
    run_case(kernel, torch.device("cpu"), case)


@pytest.mark.gpu
@settings(max_examples=100, **FIXED)
@given(case=almost_one_key(140, wants_dlse=st.booleans()))
def test_almost_one_key_on_a_gpu(kernel, case):
    run_case(kernel, torch.device("cuda"), case)
