"""Attention on the CPU with each instruction set that this machine offers, not only its best."""

import pytest
import reference
import torch
from attention.comparison import (
    DIFFERENTIABLE,
    allowed_errors,
    make_inputs,
    make_packed,
    random_dlse,
    random_dout,
    run_formula,
)
from errors import assert_same_bits, assert_within

DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of csrc's DType
NAN = float("nan")


# What an engine computes with: the last two serve bf16 alone.
ENGINES = [(isa, dtype) for isa in ("plain", "avx2", "avx512") for dtype in DTYPES]
ENGINES += [(isa, torch.bfloat16) for isa in ("avx512_bf16", "amx_bf16")]


def _name(engine: tuple) -> str:
    return f"{engine[0]}-{str(engine[1]).split('.')[-1]}"


@pytest.fixture(params=ENGINES, ids=_name)
def place(native, request):
    """``device`` and ``dtype`` of the inputs, for each engine of this machine in its turn."""
    isa, dtype = request.param
    best = len(native.isa_names()) - 1
    native.limit_cpu_isa(native.isa_names().index(isa))
    if native.isa_names()[native.cpu_isa()] != isa:
        native.limit_cpu_isa(best)
        pytest.skip(f"this machine has no {isa}")
    yield {"device": torch.device("cpu"), "dtype": dtype}
    native.limit_cpu_isa(best)


def strides(tensor: torch.Tensor) -> tuple:
    """(batch, row, head)."""
    return (0, *tensor.stride()[:2]) if tensor.dim() == 3 else tensor.stride()[:3]


def bias_strides(tensor: torch.Tensor) -> tuple:
    """(batch, head, row), 0 where the bias is broadcast."""
    found = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return (0, *found[:2]) if tensor.dim() == 3 else tuple(found[:3])


def problem_fields(inputs: dict, options: dict) -> dict:
    """AttentionProblem and the input tensors of the params structs."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    left, right = options.get("window_size", (-1, -1))
    fields = {
        "dtype": DTYPES.index(q.dtype),
        "num_heads_q": q.shape[-2],
        "num_heads_kv": k.shape[-2],
        "head_dim": q.shape[-1],
        "head_dim_v": v.shape[-1],
        "softmax_scale": options.get("softmax_scale", q.shape[-1] ** -0.5),
        "softcap": options.get("softcap", 0.0),
        "window_left": left,
        "window_right": 0 if options.get("causal") else right,
        "dropout_p": options.get("dropout_p", 0.0),
    }
    for name in ("q", "k", "v"):
        fields[name] = inputs[name].data_ptr()
        fields[f"{name}_strides"] = strides(inputs[name])
    if "cu_seqlens_q" in inputs:
        fields["batch_size"] = len(inputs["cu_seqlens_q"]) - 1
        fields["cu_seqlens_q"] = inputs["cu_seqlens_q"].data_ptr()
        fields["cu_seqlens_k"] = inputs["cu_seqlens_k"].data_ptr()
        fields["total_q"], fields["total_k"] = q.shape[0], k.shape[0]
    else:
        fields["batch_size"], fields["seqlen_q"], fields["seqlen_k"] = (*q.shape[:2], k.shape[1])
        fields["total_q"], fields["total_k"] = q.shape[:2].numel(), k.shape[:2].numel()
    if "rng_state" in inputs:
        fields["rng_state"] = inputs["rng_state"].data_ptr()
    if inputs.get("alibi_slopes") is not None:
        slopes = inputs["alibi_slopes"]
        fields["alibi_slopes"] = slopes.data_ptr()
        fields["alibi_batch_stride"] = slopes.stride(0) if slopes.dim() == 2 else 0
    if inputs.get("s_aux") is not None:
        fields["s_aux"] = inputs["s_aux"].data_ptr()
        fields["s_aux_dtype"] = DTYPES.index(inputs["s_aux"].dtype)
    if inputs.get("attn_bias") is not None:
        bias = inputs["attn_bias"]
        fields["attn_bias"], fields["attn_bias_dtype"] = bias.data_ptr(), DTYPES.index(bias.dtype)
        fields["attn_bias_strides"], fields["bias_columns"] = bias_strides(bias), bias.shape[-1]
    return fields


def run_native(native, inputs, dout, dlse=None, threads=2, **options) -> dict:
    """Results and gradients like comparison.run_ours; gradients of s_aux and attn_bias in fp32."""
    q, v = inputs["q"], inputs["v"]
    lse_shape = [q.shape[1], q.shape[0]] if q.dim() == 3 else [q.shape[0], q.shape[2], q.shape[1]]
    out = torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype)
    softmax_lse = torch.full(lse_shape, NAN)
    fields = problem_fields(inputs, options)
    fields |= {"out": out.data_ptr(), "softmax_lse": softmax_lse.data_ptr()}
    assert native.attention_fwd(fields, threads), "wrote behind its workspace"

    grads = {}
    for name in DIFFERENTIABLE:
        if inputs.get(name) is not None:
            dtype = q.dtype if name in ("q", "k", "v") else torch.float32
            grads[f"d{name}"] = torch.full(inputs[name].shape, NAN, dtype=dtype)
            fields[f"d{name}"] = grads[f"d{name}"].data_ptr()
    if "dattn_bias" in grads:
        fields["dattn_bias_strides"] = bias_strides(grads["dattn_bias"])
    if dout is not None:
        fields["dout"], fields["dout_strides"] = dout.data_ptr(), strides(dout)
    if dlse is not None:
        fields["dsoftmax_lse"] = dlse.data_ptr()
    assert native.attention_bwd(fields, threads), "wrote behind its workspace"
    return {"out": out, "softmax_lse": softmax_lse, **grads}


def check(native, inputs, dlse=None, **options) -> dict:
    dout = random_dout(inputs)
    ours = run_native(native, inputs, dout, dlse, **options)
    inputs = {name: value for name, value in inputs.items() if name != "rng_state"}
    options.pop("threads", None)
    arguments = {"dout": dout, "dsoftmax_lse": dlse, **options}
    expected = run_formula(inputs, dtype=torch.float64, **arguments)
    allowed = allowed_errors(inputs, expected, **arguments)
    for name, value in expected.items():
        assert_within(name, ours[name], value, allowed[name])
    return ours


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (40, 72), (1, 257)])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims(native, place, head_dim, head_dim_v, causal):
    inputs = make_inputs(place, 1, 129, 200, (4, 2), head_dim, head_dim_v)
    check(native, inputs, causal=causal)


def test_several_tiles_in_both_directions(native, place):
    """Longer than every engine's tiles, and no multiple of them."""
    check(native, make_inputs(place, 1, 300, 1100, (2, 1), 32), causal=True)


def test_packed_sequences_behind_nan(native, place):
    inputs = make_packed(place, [0, 70, 1, 33], [9, 0, 140, 33], more_rows=3)
    covered_q, covered_k = (int(inputs[f"cu_seqlens_{x}"][-1]) for x in "qk")
    dlse = random_dlse(inputs)
    expected = check(native, inputs, dlse, causal=True)
    for name, covered in (("q", covered_q), ("k", covered_k), ("v", covered_k)):
        inputs[name][covered:] = NAN
    dout = random_dout(inputs)
    ours = run_native(native, inputs, dout, dlse, causal=True)
    for name in ("out", "dq", "dk", "dv"):
        assert ours[name].isfinite().all(), name
    assert_same_bits("out", ours["out"], expected["out"])


def test_every_term_of_a_score(native, place):
    batch_size, rows, keys, heads = 2, 70, 90, 4
    inputs = make_inputs(place, batch_size, rows, keys, (heads, 2), 64)
    inputs["alibi_slopes"] = torch.rand(batch_size, heads)
    inputs["s_aux"] = torch.randn(heads)
    inputs["attn_bias"] = torch.randn(1, heads, rows, keys, dtype=place["dtype"])
    inputs["attn_bias"][..., 3, :] = -torch.inf  # row 3 sees no key
    check(native, inputs, random_dlse(inputs), softcap=4.0, window_size=(60, 11))


@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (2, 1, 70, 90), (1, 4, 1, 90), (2, 4, 70, 90)])
def test_bias_gradient_sums_over_broadcast_dimensions(native, place, shape):
    inputs = make_inputs(place, 2, 70, 90, (4, 2), 32)
    inputs["attn_bias"] = torch.randn(shape, dtype=place["dtype"])
    check(native, inputs)


def test_dropout(native, place):
    batch_size, rows, keys, heads, dropout_p = 2, 70, 140, 4, 0.3
    inputs = make_inputs(place, batch_size, rows, keys, (heads, 2), 64)
    inputs["rng_state"] = torch.tensor([2**40 + 5, 2**33 + 1])
    state = inputs["rng_state"].tolist()
    keep = torch.stack(
        [reference.dropout_keep(state, dropout_p, b, heads, rows, keys) for b in range(batch_size)]
    )
    check(native, inputs, dropout_p=dropout_p, dropout_keep=keep)


@pytest.mark.parametrize("threads", [2, 16])
def test_more_threads_than_heads(native, place, threads):
    """Threads share the rows, then the keys, of one KV head; gradients repeat bit for bit."""
    inputs = make_inputs(place, 1, 200, 700, (3, 1), 64)
    dout = random_dout(inputs)
    first = run_native(native, inputs, dout, threads=threads, causal=True)
    for _ in range(2):
        again = run_native(native, inputs, dout, threads=threads, causal=True)
        for name, value in first.items():
            assert_same_bits(name, again[name], value)
    check(native, inputs, threads=threads, causal=True)


def test_output_does_not_depend_on_threads(native, place):
    inputs = make_inputs(place, 1, 600, 700, (3, 1), 64)
    dout = random_dout(inputs)
    one, many = (run_native(native, inputs, dout, threads=n, causal=True) for n in (1, 7))
    for name in ("out", "softmax_lse", "dk", "dv"):
        assert_same_bits(name, one[name], many[name])


def test_no_gradient_of_the_output(native, place):
    """A loss of softmax_lse alone: dout is null."""
    inputs = make_inputs(place, 1, 70, 90, (2, 1), 64)
    dlse = random_dlse(inputs)
    ours = run_native(native, inputs, None, dlse)
    zero = torch.zeros_like(random_dout(inputs))
    expected = run_formula(inputs, zero, dlse, dtype=torch.float64)
    allowed = allowed_errors(inputs, expected, dout=zero, dsoftmax_lse=dlse)
    for name in ("dq", "dk", "dv"):
        assert_within(name, ours[name], expected[name], allowed[name])


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_scales_that_are_not_positive(native, place, scale):
    inputs = make_inputs(place, 1, 70, 90, (2, 1), 64)
    check(native, inputs, softmax_scale=scale, causal=True)


def test_strides_beyond_32_bits(native, place):
    """The memory between the two entries is reserved, never touched."""
    far, apart = 2**31 + 64, 4096
    memory = torch.empty(far + 3 * apart, dtype=place["dtype"])
    inputs = make_inputs(place, 2, 9, 9, (2, 1), 16)
    for index, (name, near) in enumerate(inputs.items()):
        strides_of_far = (far, *near.stride()[1:])
        view = memory.as_strided(near.shape, strides_of_far, index * apart)
        inputs[name] = view.copy_(near)
    check(native, inputs, causal=True)


def test_all_engines_are_reached(native):
    """Each limit below the machine's best selects exactly itself."""
    for wanted in range(native.cpu_isa() + 1):
        native.limit_cpu_isa(wanted)
        assert native.cpu_isa() == wanted
    native.limit_cpu_isa(len(native.isa_names()) - 1)
