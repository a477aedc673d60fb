"""Bad input: an error that names the argument, its value and what is allowed; no kernel runs."""

import math

import pytest
import torch

from .comparison import cumulative, make_inputs, make_packed


def refused(call, *parts):
    """The call raises ValueError, and its text holds all the parts."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        call()
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
    assert ".cpp" not in text, f"{text!r} names a source file"


def dense(kernel, inputs, **options):
    return lambda: kernel.flash_attn_func(**{**inputs, **options})


def packed(kernel, inputs, **options):
    arguments = {"max_seqlen_q": 65, "max_seqlen_k": 65, **inputs, **options}
    return lambda: kernel.flash_attn_varlen_func(**arguments)


@pytest.fixture
def inputs(bf16_place):
    return make_inputs(bf16_place, 2, 9, 12, (4, 2), 16)


@pytest.fixture
def packed_inputs(bf16_place):
    return make_packed(bf16_place, [5, 4], [3, 9], (4, 2), 16)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rank(kernel, inputs, packed_inputs, name):
    refused(dense(kernel, {**inputs, name: inputs[name][0]}), name, "3 dimensions", "4")
    wrong = {**packed_inputs, name: packed_inputs[name][None]}
    refused(packed(kernel, wrong), name, "4 dimensions", "3")


def test_rank_of_scalars(kernel, inputs):
    refused(dense(kernel, inputs, q=torch.tensor(1.0).to(inputs["q"])), "q has shape ()")


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 4), (2, 3)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_head_counts_that_do_not_divide(kernel, bf16_place, heads):
    inputs = make_inputs(bf16_place, 1, 5, 5, heads, 16)
    parts = (f"q has {heads[0]} heads", f"have {heads[1]}", "multiple")
    refused(dense(kernel, inputs), *parts)
    refused(packed(kernel, make_packed(bf16_place, [5], heads=heads, head_dim=16)), *parts)


@pytest.mark.parametrize("heads", [(8, 0), (0, 2), (0, 0)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_no_heads(kernel, bf16_place, heads):
    inputs = make_inputs(bf16_place, 1, 5, 5, heads, 16)
    refused(dense(kernel, inputs), f"q has {heads[0]} heads", f"have {heads[1]}")


def test_head_counts_of_k_and_v(kernel, inputs):
    refused(dense(kernel, inputs, v=inputs["v"][:, :, :1]), "k has 2 heads", "v has 1")


@pytest.mark.parametrize("head_dim", [0, 513, 1024])
def test_head_dim_out_of_range(kernel, bf16_place, head_dim):
    good = make_inputs(bf16_place, 1, 5, 5, (4, 2), 16)
    bad = make_inputs(bf16_place, 1, 5, 5, (4, 2), head_dim)
    parts = (f"head_dim {head_dim}", "1 to 512")
    refused(dense(kernel, bad), "q", *parts)
    refused(dense(kernel, {**good, "v": bad["v"]}), "v", *parts)


def test_head_dim_of_q_and_k(kernel, inputs):
    refused(dense(kernel, inputs, k=inputs["k"][..., :8]), "q has head_dim 16", "k has head_dim 8")


def test_lengths_of_k_and_v(kernel, inputs, packed_inputs):
    refused(dense(kernel, inputs, v=inputs["v"][:, :7]), "k has 12 rows", "v has 7")
    wrong = {**packed_inputs, "v": packed_inputs["v"][:7]}
    refused(packed(kernel, wrong), "k has 12 rows", "v has 7")


def test_batch_sizes(kernel, inputs):
    refused(dense(kernel, inputs, k=inputs["k"][:1]), "batch sizes 2, 1 and 2")


def test_dtype_mix(kernel, inputs):
    # What a norm that returns float32 does under autocast
    wrong = {**inputs, "q": inputs["q"].float(), "k": inputs["k"].float()}
    parts = ("torch.float32", "torch.bfloat16", "q.to(v.dtype)", "autocast")
    refused(dense(kernel, wrong), *parts)
    wrong["k"] = wrong["k"].half()
    refused(dense(kernel, wrong), "q is torch.float32", "k is torch.float16", "v is torch.bfloat16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
def test_dtypes_that_attention_does_not_take(kernel, inputs, dtype):
    wrong = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    refused(dense(kernel, wrong), "q, k and v have dtype", "torch.bfloat16", "torch.float16")


@pytest.mark.parametrize("names", ["kv", "qkv", "v"])
def test_float8_keys_are_a_caches(kernel, inputs, packed_inputs, names):
    parts = (f"{names.replace('q', '')[0]} has dtype torch.float8_e4m3fn",)
    parts += ("flash_attn_with_kvcache", "k_descale", "q in torch.bfloat16 or torch.float16")
    for call, given in ((dense, inputs), (packed, packed_inputs)):
        wrong = {name: given[name].to(torch.float8_e4m3fn) for name in names}
        refused(call(kernel, {**given, **wrong}), *parts)
        on_meta = {n: x.to("meta") for n, x in {**given, **wrong}.items()}
        refused(call(kernel, on_meta), *parts)


def test_a_mask_is_no_bias(kernel, inputs, packed_inputs):
    mask = torch.ones(9, 12, dtype=torch.bool, device=inputs["q"].device)
    parts = ("attn_bias has dtype torch.bool", "masked_fill(~mask, float('-inf'))")
    refused(dense(kernel, inputs, attn_bias=mask[None, None]), *parts)
    refused(packed(kernel, packed_inputs, attn_bias=mask[None]), *parts)
    # Of two dimensions: dtype and shape at once.
    parts = ("shape (9, 12), a mask", "1 or seqlen_q, seqlen_k)", "float('-inf'))[None, None]")
    refused(dense(kernel, inputs, attn_bias=mask), *parts)
    parts = ("(9, 12), a mask", "(1 or num_heads_q, 1 or total_q", "float('-inf'))[None]")
    refused(packed(kernel, packed_inputs, attn_bias=mask), *parts)
    # The cure does what it says.
    q = inputs["q"]
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    same = kernel.flash_attn_func(**inputs)
    assert torch.equal(kernel.flash_attn_func(**inputs, attn_bias=bias[None, None]), same)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_padding_mask_is_no_bias(kernel, inputs, packed_inputs, dtype):
    mask = torch.ones(2, 12, dtype=dtype, device=inputs["q"].device)
    parts = (
        f"attn_bias has dtype {dtype} and shape (2, 12), as a padding mask has it",
        "flash_attn_varlen_func with their cu_seqlens_q and cu_seqlens_k, and with seqused_k",
    )
    refused(dense(kernel, inputs, attn_bias=mask), *parts)
    refused(packed(kernel, packed_inputs, attn_bias=mask), *parts)
    other = torch.ones(2, 1, 9, 12, dtype=torch.int64, device=mask.device)
    refused(dense(kernel, inputs, attn_bias=other), "attn_bias has dtype torch.int64", "float32")
    lengths = packed_inputs["cu_seqlens_q"]
    wrong = {**packed_inputs, "cu_seqlens_q": lengths.sum(dtype=torch.int32)}  # no dimension
    refused(packed(kernel, wrong, attn_bias=mask), "cu_seqlens_q has shape ()")


def test_a_tensor_in_the_place_of_dropout_p(kernel, inputs, packed_inputs):
    """The fourth argument is torch's attn_mask in scaled_dot_product_attention."""
    q, k, v = (inputs[name] for name in "qkv")
    for mask in (torch.ones(9, 12, dtype=torch.bool), torch.zeros(2, 1, 9, 12)):
        parts = ("dropout_p is a tensor of shape", str(tuple(mask.shape)), "attn_bias=", "by name")
        refused(lambda mask=mask: kernel.flash_attn_func(q, k, v, mask), *parts)
    parts = ("dropout_p is None; it must be a number", "attn_mask", "attn_bias=", "by name")
    refused(lambda: kernel.flash_attn_func(q, k, v, None), *parts)
    refused(lambda: kernel.flash_attn_func(q, k, v, None, 0.0, True), *parts)
    lengths = packed_inputs["cu_seqlens_q"]
    parts = ("dropout_p is a tensor of shape (3,)", "flash_attn_varlen_func")
    refused(lambda: kernel.flash_attn_func(q, k, v, lengths, lengths), *parts)


def test_lengths_in_the_place_of_cu_seqlens(kernel, packed_inputs):
    lengths = torch.tensor([5, 4], device=packed_inputs["q"].device)
    wrong = lengths.to(torch.int32)
    call = packed(kernel, {**packed_inputs, "cu_seqlens_q": wrong, "cu_seqlens_k": wrong})
    cure = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)"
    if packed_inputs["q"].device.type == "cpu":  # on a GPU values are read if asked for
        refused(call, "cu_seqlens_q[0] is 5", "must be 0", cure)
    cured = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    assert torch.equal(cured, packed_inputs["cu_seqlens_q"])


@pytest.mark.gpu
def test_float32_on_a_gpu(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.float32}
    wrong = make_inputs(place, 1, 5, 5, (4, 2), 16)
    refused(dense(kernel, wrong), "torch.float32 on cuda:0", "autocast", "torch.bfloat16")


def test_device_mix(kernel, inputs):
    for name in ("k", "v"):
        wrong = {**inputs, name: inputs[name].to("meta")}
        device = str(inputs["q"].device)
        refused(dense(kernel, wrong), f"{name} is on meta", f"q is on {device}", "one device")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "alibi_slopes", "s_aux", "attn_bias"])
def test_device_mix_of_cpu_and_gpu(kernel, name):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_inputs(place, 1, 5, 5, (4, 2), 16)
    inputs["alibi_slopes"] = torch.rand(4, device="cuda")
    inputs["s_aux"] = torch.rand(4, **place)
    inputs["attn_bias"] = torch.rand(1, 1, 5, 5, **place)
    refused(dense(kernel, {**inputs, name: inputs[name].cpu()}), f"{name} is on cpu", "cuda:0")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_index_tensor_on_the_cpu_for_inputs_on_a_gpu(kernel, name):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_packed(place, [5, 4], heads=(4, 2), head_dim=16)
    refused(packed(kernel, {**inputs, name: inputs[name].cpu()}), f"{name} is on cpu", "cuda:0")


@pytest.mark.parametrize("softmax_scale", [math.nan, math.inf, -math.inf, 1e300])
def test_softmax_scale(kernel, inputs, softmax_scale):
    refused(dense(kernel, inputs, softmax_scale=softmax_scale), "softmax_scale", "finite")


@pytest.mark.parametrize("window_size", [(-2, 0), (0, -2), (7, -8), (-100, -1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_window(kernel, inputs, window_size, causal):
    call = dense(kernel, inputs, window_size=window_size, causal=causal)
    refused(call, f"window_size is ({window_size[0]}, {window_size[1]})", "-1", "at least 0")


def test_window_with_one_entry(kernel, inputs):
    refused(dense(kernel, inputs, window_size=(3,)), "window_size is (3,)", "two entries")


@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf])
def test_softcap(kernel, inputs, softcap):
    refused(dense(kernel, inputs, softcap=softcap), f"softcap is {softcap:g}", "positive")


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, math.nan, 1 - 1e-12])
def test_dropout_p(kernel, inputs, dropout_p):
    refused(dense(kernel, inputs, dropout_p=dropout_p), "dropout_p is", "[0, 1)")


def test_return_attn_probs_with_dropout(kernel, inputs, packed_inputs):
    options = {"dropout_p": 0.1, "return_attn_probs": True}
    parts = ("return_attn_probs is True", "dropout_p 0.1", "return_softmax_lse=True")
    refused(dense(kernel, inputs, **options), *parts)
    refused(packed(kernel, packed_inputs, **options), *parts)


@pytest.mark.parametrize("shape", [(2,), (5,), (1, 4), (3, 4), (2, 2), (2, 4, 1), ()], ids=str)
def test_shape_of_alibi_slopes(kernel, inputs, shape):
    slopes = torch.rand(shape, device=inputs["q"].device)
    refused(dense(kernel, inputs, alibi_slopes=slopes), "alibi_slopes has shape", "(4,)", "(2, 4)")


def test_dtype_of_alibi_slopes(kernel, inputs):
    slopes = torch.rand(4, device=inputs["q"].device, dtype=torch.bfloat16)
    refused(dense(kernel, inputs, alibi_slopes=slopes), "alibi_slopes", "bfloat16", "float32")


def test_alibi_slopes_that_want_a_gradient(kernel, inputs):
    slopes = torch.rand(4, device=inputs["q"].device, requires_grad=True)
    refused(dense(kernel, inputs, alibi_slopes=slopes), "alibi_slopes.requires_grad", "detach()")
    with torch.no_grad():
        dense(kernel, inputs, alibi_slopes=slopes)()


@pytest.mark.parametrize("shape", [(2,), (5,), (1, 4), ()], ids=str)
def test_shape_of_s_aux(kernel, inputs, shape):
    s_aux = torch.rand(shape, device=inputs["q"].device)
    refused(dense(kernel, inputs, s_aux=s_aux), "s_aux has shape", "(4,)")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_dtype_of_s_aux(kernel, inputs, dtype):
    s_aux = torch.ones(4, device=inputs["q"].device, dtype=dtype)
    refused(dense(kernel, inputs, s_aux=s_aux), "s_aux has dtype", "torch.bfloat16")


@pytest.mark.parametrize(
    "shape",
    [(9, 12), (4, 9, 12), (3, 4, 9, 12), (2, 2, 9, 12), (2, 4, 8, 12), (2, 4, 9, 13), (2, 4, 9, 1)],
    ids=str,
)
def test_shape_of_attn_bias(kernel, inputs, shape):
    bias = torch.rand(shape, device=inputs["q"].device, dtype=torch.bfloat16)
    refused(dense(kernel, inputs, attn_bias=bias), "attn_bias has shape", "seqlen_k")


@pytest.mark.parametrize("shape", [(9, 9), (2, 9, 9), (4, 8, 9), (1, 4, 9, 9)], ids=str)
def test_shape_of_packed_attn_bias(kernel, packed_inputs, shape):
    bias = torch.rand(shape, device=packed_inputs["q"].device, dtype=torch.bfloat16)
    refused(packed(kernel, packed_inputs, attn_bias=bias), "attn_bias has shape", "total_q")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.float64])
def test_dtype_of_attn_bias(kernel, inputs, dtype):
    bias = torch.ones(1, 1, 9, 12, device=inputs["q"].device).to(dtype)
    refused(dense(kernel, inputs, attn_bias=bias), "attn_bias has dtype", "torch.float32")


INDEX_NAMES = pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])


@INDEX_NAMES
def test_dtype_of_cu_seqlens(kernel, packed_inputs, name):
    wrong = {**packed_inputs, name: packed_inputs[name].long()}
    refused(packed(kernel, wrong), f"{name} has dtype torch.int64", "torch.int32")


@INDEX_NAMES
def test_rank_of_cu_seqlens(kernel, packed_inputs, name):
    wrong = {**packed_inputs, name: packed_inputs[name][None]}
    refused(packed(kernel, wrong), f"{name} has shape (1, 3)", "batch_size + 1")


@INDEX_NAMES
def test_empty_cu_seqlens(kernel, packed_inputs, name):
    refused(packed(kernel, {**packed_inputs, name: packed_inputs[name][:0]}), name, "empty")


@INDEX_NAMES
def test_strided_cu_seqlens(kernel, packed_inputs, name):
    strided = packed_inputs[name].repeat_interleave(2)[::2]
    refused(packed(kernel, {**packed_inputs, name: strided}), name, "not contiguous")


@INDEX_NAMES
def test_missing_cu_seqlens(kernel, packed_inputs, name):
    refused(packed(kernel, {**packed_inputs, name: None}), f"{name} is None", "int32")


def test_lengths_of_cu_seqlens(kernel, packed_inputs):
    shorter = packed_inputs["cu_seqlens_k"][:2]
    refused(packed(kernel, {**packed_inputs, "cu_seqlens_k": shorter}), "has 3", "has 2")


WRONG_VALUES = [
    ([1, 5, 9], "[0] is 1"),
    ([-1, 5, 9], "[0] is -1"),
    ([0, 6, 5], "decreases at index 2: 6, 5"),
    ([0, -3, 9], "decreases at index 1: 0, -3"),
    ([0, 5, 13], "ends at 13"),
    ([0, 5, 2**31 - 1], "ends at 2147483647"),
]


def checked_inputs(kernel, packed_inputs):
    """Index values are always checked on the CPU, and on a GPU when asked for."""
    kernel.check_inputs(packed_inputs["q"].device.type == "cuda")


@pytest.fixture
def _unchecked_afterwards(kernel):
    yield
    kernel.check_inputs(False)


@INDEX_NAMES
@pytest.mark.usefixtures("_unchecked_afterwards")
@pytest.mark.parametrize(("values", "part"), WRONG_VALUES, ids=str)
def test_values_of_cu_seqlens(kernel, packed_inputs, name, values, part):
    checked_inputs(kernel, packed_inputs)
    device = packed_inputs["q"].device
    wrong = torch.tensor(values, dtype=torch.int32, device=device)
    rows = len(packed_inputs["q" if name == "cu_seqlens_q" else "k"])
    last = values[-1]
    if part.startswith("ends") and last <= rows:
        wrong[-1] = last = rows + 1
        part = f"ends at {last}"
    refused(packed(kernel, {**packed_inputs, name: wrong}), name, part)


@pytest.mark.usefixtures("_unchecked_afterwards")
def test_columns_of_packed_attn_bias(kernel, packed_inputs):
    checked_inputs(kernel, packed_inputs)
    bias = torch.rand(4, 9, 8, device=packed_inputs["q"].device)
    call = packed(kernel, packed_inputs, attn_bias=bias)
    refused(call, "attn_bias has 8 columns", "cu_seqlens_k has 9 keys")


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen(kernel, packed_inputs, name):
    refused(packed(kernel, packed_inputs, **{name: -1}), f"{name} is -1", "at least 0")
    refused(packed(kernel, packed_inputs, **{name: None}), f"{name} is None")
    wrong = torch.tensor([5, 4])
    refused(packed(kernel, packed_inputs, **{name: wrong}), f"{name} has shape (2,)")
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        wrong = torch.ones((), dtype=dtype)
        said = f"{name} is a tensor of {dtype}; it must be an int"
        refused(packed(kernel, packed_inputs, **{name: wrong}), said)
    packed(kernel, packed_inputs, **{name: torch.tensor(9)})()


@pytest.mark.parametrize(
    "value", [0, 1, None, 2, -1, 1.5, "no", torch.tensor(True), torch.tensor(1)], ids=repr
)
def test_flags(kernel, inputs, packed_inputs, value):
    """Every flag of every function."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    cache = {"q": q, "k_cache": k, "v_cache": v}
    calls = [
        *((dense, inputs, n) for n in ("causal", "deterministic", "return_softmax_lse")),
        *((packed, packed_inputs, n) for n in ("causal", "deterministic", "return_attn_probs")),
    ]
    calls = [(name, call(kernel, given, **{name: value})) for call, given, name in calls]
    for name in ("causal", "rotary_interleaved", "return_softmax_lse"):
        options = {**cache, name: value}
        calls.append((name, lambda o=options: kernel.flash_attn_with_kvcache(**o)))
    for name in ("prenorm", "residual_in_fp32"):
        for norm in (kernel.rms_norm, kernel.layer_norm):
            calls.append((name, lambda norm=norm, name=name: norm(q, **{name: value})))
    for name, call in calls:
        if value is None or (type(value) is int and value in (0, 1)):
            call()
        else:
            refused(call, f"{name} is {value!r} ({type(value).__name__}); it must be True or False")
    if value == 2:
        refused(lambda: kernel.check_inputs(value), "enabled is 2 (int)")


def test_flags_by_position(kernel, inputs, packed_inputs):
    """The arguments between them and k, v are many."""
    said = "; write flags by name, as in causal=True"
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    refused(lambda: kernel.flash_attn_func(q, k, v, True), "dropout_p is True", said)
    refused(lambda: kernel.flash_attn_func(q, k, v, 0.0, True), "softmax_scale is True", said)
    refused(lambda: kernel.flash_attn_func(q, k, v, 0.0, None, True, True), "window_size", said)
    refused(dense(kernel, inputs, alibi_slopes=True), "alibi_slopes is True", said)
    refused(packed(kernel, packed_inputs, max_seqlen_k=True), "max_seqlen_k is True", said)
    refused(packed(kernel, packed_inputs, cu_seqlens_k=True), "cu_seqlens_k is True", said)
    with_cache = kernel.flash_attn_with_kvcache
    refused(lambda: with_cache(q, k, v, k, v, True, cache_seqlens=0), "rotary_cos is True", said)


@pytest.mark.parametrize("device", ["of values", "meta"])
def test_heads_before_rows(kernel, inputs, device):
    """As torch.nn.functional.scaled_dot_product_attention has them."""
    inputs = {name: tensor.transpose(1, 2) for name, tensor in inputs.items()}
    if device == "meta":
        inputs = {name: tensor.to("meta") for name, tensor in inputs.items()}
    refused(
        dense(kernel, inputs),
        "q has 9 heads and k and v have 12",
        "q has shape (2, 4, 9, 16), expected (batch_size, seqlen_q, num_heads_q, head_dim)",
        "it looks transposed, pass q.transpose(1, 2), and k and v likewise",
    )


@pytest.mark.parametrize("device", ["of values", "meta"])
@pytest.mark.parametrize(
    ("rows", "heads", "transposed"),
    [
        ((1024, 1024), (14, 4), False),
        ((1024, 512), (14, 4), False),
        ((8, 8), (14, 4), False),  # may as well be 8 heads of 14 and 4 rows
        ((8, 8), (1, 100), True),  # a new row of 8 heads and their keys
        ((8, 8), (1000, 77), True),
        ((14, 2), (1024, 1000), True),
        ((14, 4), (1024, 1000), False),
    ],
    ids=str,
)
def test_heads_that_do_not_divide_and_how_they_are_laid_out(
    kernel, bf16_place, device, rows, heads, transposed
):
    place = bf16_place if device == "of values" else {**bf16_place, "device": "meta"}
    q = torch.empty(1, rows[0], heads[0], 64, **place)
    k = torch.empty(1, rows[1], heads[1], 64, **place)
    with pytest.raises(ValueError, match=f"^q has {heads[0]} heads? .* multiple") as caught:
        kernel.flash_attn_func(q, k, k)
    assert ("transpose" in str(caught.value)) == transposed


def test_packed_tensors(kernel, bf16_place):
    qkv = torch.rand(1, 5, 2, 4, 16, **bf16_place)
    refused(lambda: kernel.flash_attn_qkvpacked_func(qkv), "qkv has shape (1, 5, 2, 4, 16)", "3")
    q = torch.rand(1, 5, 4, 16, **bf16_place)
    kv = torch.rand(1, 5, 3, 4, 16, **bf16_place)
    refused(lambda: kernel.flash_attn_kvpacked_func(q, kv), "kv has shape (1, 5, 3, 4, 16)", "2")
    index = cumulative([5], bf16_place["device"])
    refused(lambda: kernel.flash_attn_varlen_qkvpacked_func(qkv[0], index, 5), "qkv has shape", "3")
    refused(
        lambda: kernel.flash_attn_varlen_kvpacked_func(q[0], kv[0], index, index, 5, 5),
        "kv has shape",
        "2",
    )


def test_second_derivative(kernel, inputs):
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    out = kernel.flash_attn_func(**leaves)
    (dq,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.gpu
def test_check_inputs_during_a_capture(kernel):
    place = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    inputs = make_packed(place, [5, 4], heads=(4, 2), head_dim=16)
    packed(kernel, inputs)()
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernel.check_inputs(True)
    kernel.check_inputs(True)
    try:
        with (
            pytest.raises(RuntimeError, match="check_inputs"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            packed(kernel, inputs)()
    finally:
        kernel.check_inputs(False)


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "alibi_slopes", "s_aux", "attn_bias", "cu_seqlens_q", "cu_seqlens_k"]
)
def test_dtensor(kernel, name):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    more = {"alibi_slopes": torch.rand(4), "s_aux": torch.rand(4)}
    inputs = {**make_inputs(place, 1, 5, 5, (4, 2), 16), **more}
    inputs["attn_bias"] = torch.rand(1, 1, 5, 5)
    call = dense
    if name.startswith("cu_seqlens"):
        inputs, call = make_packed(place, [5, 4], heads=(4, 2), head_dim=16), packed
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        inputs[name] = distribute_tensor(inputs[name], mesh, [Replicate()])
        refused(call(kernel, inputs), f"{name} is a DTensor", f"{name}.to_local()")
    finally:
        destroy_process_group()
