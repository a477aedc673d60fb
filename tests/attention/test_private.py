"""FlashAttention-2's private functions, which callers reach for (huggingface/diffusers#14012):
names, signatures, results."""

import inspect
import math

import pytest
import reference
import torch
from errors import assert_same_bits, assert_within, assert_zero, poisoned_memory

from .comparison import make_inputs, make_packed, random_dout, run_ours
from .kvcache_comparison import lengths_tensor, random_pages

DENSE_FORWARD = (
    "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap "
    "alibi_slopes return_softmax"
)
DENSE_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state"
)
VARLEN_FORWARD = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes return_softmax block_table leftpad_k "
    "seqused_k zero_tensors"
)
VARLEN_BACKWARD = (
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state zero_tensors"
)
SIGNATURES = {
    "_flash_attn_forward": DENSE_FORWARD,
    "_flash_attn_backward": DENSE_BACKWARD,
    "_flash_attn_varlen_forward": VARLEN_FORWARD,
    "_flash_attn_varlen_backward": VARLEN_BACKWARD,
    "_wrapped_flash_attn_forward": DENSE_FORWARD,
    "_wrapped_flash_attn_backward": DENSE_BACKWARD,
}
POSITIONAL = (
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs"
)
KEYWORDS = "s_aux attn_bias return_softmax_lse"
PUBLIC = f"{POSITIONAL} {KEYWORDS}"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
PUBLIC_SIGNATURES = {
    "flash_attn_func": f"q k v {PUBLIC}",
    "flash_attn_qkvpacked_func": f"qkv {PUBLIC}",
    "flash_attn_kvpacked_func": f"q kv {PUBLIC}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {POSITIONAL} block_table {KEYWORDS} seqused_k",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {PUBLIC}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {PUBLIC}",
}
KEYWORD_ONLY = {*KEYWORDS.split(), "seqused_k"}
SCALE = 0.125


@pytest.mark.parametrize("name", SIGNATURES)
def test_private_signature(kernel, name):
    assert name not in kernel.__all__
    assert list(inspect.signature(getattr(kernel, name)).parameters) == SIGNATURES[name].split()


@pytest.mark.parametrize("name", PUBLIC_SIGNATURES)
def test_public_signature(kernel, name):
    assert name in kernel.__all__
    parameters = inspect.signature(getattr(kernel, name)).parameters
    assert list(parameters) == PUBLIC_SIGNATURES[name].split()
    for parameter in parameters.values():
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == (parameter.name in KEYWORD_ONLY), parameter.name
    defaults = {n: p.default for n, p in parameters.items()}
    assert defaults["dropout_p"] == 0.0
    assert defaults["softmax_scale"] is None
    assert defaults["causal"] is False
    assert defaults["window_size"] == (-1, -1)
    assert defaults["softcap"] == 0.0
    assert defaults["deterministic"] is False
    assert defaults["return_attn_probs"] is False


def forward(kernel, inputs, dropout_p=0.0):
    function = kernel._wrapped_flash_attn_forward
    return function(**inputs, dropout_p=dropout_p, softmax_scale=SCALE, causal=True,
                    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                    return_softmax=False)  # fmt: skip


def test_forward(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 2, 33, 70)
    ours = run_ours(kernel, inputs, softmax_scale=SCALE, causal=True)
    out, lse, s_dmask, rng_state = forward(kernel, inputs)
    assert_same_bits("out", out, ours["out"])
    assert_same_bits("softmax_lse", lse, ours["softmax_lse"])
    assert s_dmask.shape == (0,)
    assert rng_state.shape == (2,)
    assert rng_state.dtype == torch.int64


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_backward_fills_the_given_tensors(kernel, bf16_place, dropout_p):
    inputs = make_inputs(bf16_place, 2, 33, 70)
    dout = random_dout(inputs)
    torch.manual_seed(7)
    ours = run_ours(
        kernel, inputs, dout, softmax_scale=SCALE, causal=True, dropout_p=dropout_p,
        deterministic=True,
    )  # fmt: skip
    torch.manual_seed(7)
    out, lse, _, rng_state = forward(kernel, inputs, dropout_p)
    with poisoned_memory():
        grads = {f"d{name}": torch.empty_like(tensor) for name, tensor in inputs.items()}
        softmax_d = kernel._wrapped_flash_attn_backward(
            dout, **inputs, out=out, softmax_lse=lse, **grads, dropout_p=dropout_p,
            softmax_scale=SCALE, causal=True, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None, deterministic=True, rng_state=rng_state,
        )  # fmt: skip
    for name, gradient in grads.items():
        assert_same_bits(name, gradient, ours[name])
    delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
    assert softmax_d.shape == (2, 4, 128)
    assert_within("softmax_d", softmax_d[..., :33], delta, 1e-4)
    assert_zero("softmax_d", softmax_d[..., 33:])


def test_an_output_of_several_calls_counts_as_it_is(kernel, bf16_place):
    """Who merges the outputs of parts of the keys passes the merged one to each part's backward
    pass. With dropout, too, delta is dout times that output, not times this call's own."""
    inputs = make_inputs(bf16_place, 1, 70, 80, (2, 2), 64)
    q, k, v = (inputs[name] for name in "qkv")
    dropout_p, dout = 0.3, random_dout(inputs)
    out, softmax_lse, _, state = forward(kernel, inputs, dropout_p)
    merged = (3 * out.float() + 1).to(out.dtype)
    dq = torch.empty_like(q)
    arguments = (dropout_p, SCALE, True, -1, -1, 0.0, None, False, state)
    kernel._flash_attn_backward(dout, q, k, v, merged, softmax_lse, dq, None, None, *arguments)

    keep = reference.dropout_keep(state.tolist(), dropout_p, 0, 2, 70, 80).to(q.device)
    q, k, v, dout, merged = (x[0].transpose(0, 1).double() for x in (q, k, v, dout, merged))
    hidden = ~reference.visible_keys(70, 80, causal=True, device=q.device)
    scores = (SCALE * q @ k.transpose(1, 2)).masked_fill(hidden, -math.inf)
    probabilities = torch.softmax(scores, dim=-1)
    dprobabilities = dout @ v.transpose(1, 2) * keep / (1 - dropout_p)
    delta = (dout * merged).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - delta)
    expected = (SCALE * dscores @ k).transpose(0, 1)[None]
    # Scores' gradients are rounded to bfloat16 before the product with the keys, dq after it.
    rounding = SCALE * dscores.abs() @ k.abs() + expected[0].transpose(0, 1).abs()
    assert_within("dq", dq, expected, 2**-8 * rounding.max().item())


@pytest.mark.parametrize("weight", [0.5, 0.1, 0.03, 0.01])
def test_a_little_weight_of_another_call_shows(kernel, bf16_place, weight):
    """Of few keys delta is computed once more; not where other calls' keys have a part in the row,
    whose delta may be as close to this call's as rounding leaves it."""
    inputs = make_inputs(bf16_place, 1, 64, 5, (2, 2), 64)
    q, k, v = (inputs[name] for name in "qkv")
    dout = random_dout(inputs)
    arguments = (0.0, SCALE, False, -1, -1, 0.0, None, False)
    out, softmax_lse, _, _ = kernel._flash_attn_forward(q, k, v, *arguments)
    other = torch.randn_like(out, dtype=torch.float32)
    merged = torch.lerp(out.float(), other, weight).to(out.dtype)
    softmax_lse = softmax_lse - math.log1p(-weight)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    kernel._flash_attn_backward(dout, q, k, v, merged, softmax_lse, *grads, *arguments, None)

    q, k, v, dout, merged = (x[0].transpose(0, 1).double() for x in (q, k, v, dout, merged))
    scores = SCALE * q @ k.transpose(1, 2)
    probabilities = (1 - weight) * torch.softmax(scores, dim=-1)
    delta = (dout * merged).sum(-1, keepdim=True)
    dscores = probabilities * (dout @ v.transpose(1, 2) - delta)
    expected = (SCALE * dscores @ k).transpose(0, 1)[None]
    # dq is rounded once to bfloat16, and with it what float32 sums and exponentials leave.
    assert_within("dq", grads[0], expected, 2**-8 * expected.abs().max().item())


def test_packed(kernel, bf16_place):
    inputs = make_packed(bf16_place, [33, 0, 70], [20, 9, 80], more_rows=3)
    dout = random_dout(inputs)
    options = {"softmax_scale": SCALE, "causal": True}
    ours = run_ours(kernel, inputs, dout, **options, deterministic=True)
    lengths = {"max_seqlen_q": 70, "max_seqlen_k": 80}
    out, lse, s_dmask, rng_state = kernel._flash_attn_varlen_forward(
        **inputs, **lengths, dropout_p=0.0, **options
    )
    assert_same_bits("out", out, ours["out"])
    assert_same_bits("softmax_lse", lse, ours["softmax_lse"])
    assert s_dmask.shape == (0,)
    grads = {f"d{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")}
    softmax_d = kernel._flash_attn_varlen_backward(
        dout, out=out, softmax_lse=lse, **inputs, **grads, **lengths, dropout_p=0.0, **options,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        deterministic=True, rng_state=rng_state,
    )  # fmt: skip
    for name, gradient in grads.items():
        assert_same_bits(name, gradient, ours[name])
    delta = (out.double() * dout.double()).sum(-1).t()
    assert softmax_d.shape == (4, 106 + 3 * 128)
    assert_within("softmax_d", softmax_d[:, :33], delta[:, :33], 1e-4)
    second = 33 + 2 * 128  # sequence 2 begins at row 33
    assert_within("softmax_d", softmax_d[:, second : second + 70], delta[:, 33:103], 1e-4)


def test_gradients_that_are_not_wanted(kernel, bf16_place):
    inputs = make_inputs(bf16_place, 1, 9, 9)
    dout = random_dout(inputs)
    out, lse, _, _ = forward(kernel, inputs)
    dq = torch.empty_like(inputs["q"])
    kernel._flash_attn_backward(
        dout, **inputs, out=out, softmax_lse=lse, dq=dq, dk=None, dv=None, dropout_p=0.0,
        softmax_scale=SCALE, causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
        alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    assert dq.isfinite().all()


def test_no_graph_is_recorded(kernel, bf16_place):
    inputs = {name: t.requires_grad_() for name, t in make_inputs(bf16_place, 1, 9, 9).items()}
    out, lse, _, _ = forward(kernel, inputs)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_refusals(kernel, bf16_place):
    inputs = make_packed(bf16_place, [9])
    lengths = {"max_seqlen_q": 9, "max_seqlen_k": 9}
    scalars = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": False}
    call = kernel._flash_attn_varlen_forward
    with pytest.raises(ValueError, match="return_softmax is True"):
        call(**inputs, **lengths, **scalars, return_softmax=True)
    with pytest.raises(ValueError, match="leftpad_k is given without a block_table"):
        call(**inputs, **lengths, **scalars, leftpad_k=inputs["cu_seqlens_q"])


def test_used_keys(kernel, bf16_place):
    inputs = make_packed(bf16_place, [9, 4], [20, 7])
    inputs |= {"max_seqlen_q": 9, "max_seqlen_k": 20, "softmax_scale": SCALE, "causal": True}
    used = lengths_tensor([11, 7], bf16_place)
    out, lse, _, _ = kernel._flash_attn_varlen_forward(**inputs, dropout_p=0.0, seqused_k=used)
    options = {"seqused_k": used, "return_softmax_lse": True}
    expected = kernel.flash_attn_varlen_func(**inputs, **options)
    assert_same_bits("out", out, expected[0])
    assert_same_bits("lse", lse, expected[1])


def test_pages(kernel, bf16_place):
    """With a block table keys and values are pages, as flash_attn_varlen_func has them."""
    inputs = make_packed(bf16_place, [3, 5], [20, 9], head_dim=64)
    table = random_pages([20, 9], 8, bf16_place)
    pages = {name: torch.randn(7, 8, 2, 64, **bf16_place) for name in ("k", "v")}
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 20}
    scalars = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": True}
    paged = {**inputs, **pages, **lengths, **scalars, "block_table": table}
    out, lse, _, rng_state = kernel._flash_attn_varlen_forward(**paged, window_size_left=7)
    expected = kernel.flash_attn_varlen_func(**paged, window_size=(7, -1), return_softmax_lse=True)
    assert_same_bits("out", out, expected[0])
    assert_same_bits("lse", lse, expected[1])
    assert rng_state.tolist() == [0, 0]

    used, leftpad = (lengths_tensor(values, bf16_place) for values in ([17, 9], [2, 0]))
    more = {"seqused_k": used, "leftpad_k": leftpad}
    out, lse, _, _ = kernel._flash_attn_varlen_forward(**paged, **more)
    shorter = make_packed(bf16_place, [3, 5], [17, 9])["cu_seqlens_k"]
    rows = [
        kernel.flash_attn_with_kvcache(
            inputs["q"][begin:end][None],
            pages["k"],
            pages["v"],
            cache_seqlens=used[i : i + 1],
            cache_leftpad=leftpad[i : i + 1],
            block_table=table[i : i + 1],
            softmax_scale=SCALE,
            causal=True,
        )[0]
        for i, (begin, end) in enumerate(((0, 3), (3, 8)))
    ]
    unit = torch.finfo(torch.bfloat16).eps * max(1, out.abs().max().item())
    assert_within("out", out, torch.cat(rows), 4 * unit)
    out, _, _, _ = kernel._flash_attn_varlen_forward(**paged, seqused_k=used)
    expected = kernel.flash_attn_varlen_func(**{**paged, "cu_seqlens_k": shorter})
    assert_same_bits("out", out, expected)
    if bf16_place["device"].type == "cpu":
        with pytest.raises(ValueError, match=r"seqused_k\[0\] is 50"):
            kernel._flash_attn_varlen_forward(**paged, seqused_k=used + 33)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1 with a block_table"):
        kernel._flash_attn_varlen_forward(**{**paged, "dropout_p": 0.1})


@pytest.fixture
def backward_arguments(kernel, bf16_place):
    """What _flash_attn_backward takes, all of it right."""
    inputs = make_inputs(bf16_place, 2, 9, 12, (4, 2), 16, 24)
    dout = random_dout(inputs)
    out, lse, _, _ = forward(kernel, inputs)
    scalars = {"dropout_p": 0.0, "softmax_scale": SCALE, "causal": True, "softcap": 0.0}
    bounds = {"window_size_left": -1, "window_size_right": -1}
    absent = {"dq": None, "dk": None, "dv": None, "alibi_slopes": None, "deterministic": False}
    return {"dout": dout, **inputs, "out": out, "softmax_lse": lse, **scalars, **bounds, **absent}


@pytest.mark.parametrize("name", ["dout", "out"])
def test_tensors_that_are_not_like_out(kernel, backward_arguments, name):
    right = backward_arguments[name]
    for wrong in (
        right[:1],
        right[:, :8],
        right[:, :, :2],
        right[..., :16],
        right[0],
        right.half(),
    ):
        with pytest.raises(ValueError, match=f"^{name} has shape .* v's head_dim 24"):
            kernel._flash_attn_backward(**{**backward_arguments, name: wrong})


def test_lse_that_is_not_like_lse(kernel, backward_arguments):
    right = backward_arguments["softmax_lse"]
    for wrong in (right[:1], right[:, :2], right[..., :8], right[0], right.bfloat16()):
        with pytest.raises(ValueError, match=r"^softmax_lse has shape .* num_heads_q, seqlen_q\)"):
            kernel._flash_attn_backward(**{**backward_arguments, "softmax_lse": wrong})


def test_dropout_without_the_state_of_the_forward_pass(kernel, backward_arguments):
    with pytest.raises(ValueError, match=r"rng_state is missing; with dropout_p 0\.5"):
        kernel._flash_attn_backward(**{**backward_arguments, "dropout_p": 0.5})
    wrong = torch.zeros(3, dtype=torch.int64, device=backward_arguments["q"].device)
    with pytest.raises(ValueError, match=r"rng_state has dtype torch\.int64 and shape \(3,\)"):
        kernel._flash_attn_backward(**{**backward_arguments, "dropout_p": 0.5, "rng_state": wrong})


def test_layouts_of_out_and_lse_do_not_matter(kernel, backward_arguments):
    """An autograd function of another library may hand over views."""
    names = ("dq", "dk", "dv")
    like = {"dq": "q", "dk": "k", "dv": "v"}

    def gradients(**views):
        given = {name: torch.empty_like(backward_arguments[like[name]]) for name in names}
        arguments = {**backward_arguments, **views, **given, "deterministic": True}
        kernel._flash_attn_backward(**arguments)
        return given

    out, lse = backward_arguments["out"], backward_arguments["softmax_lse"]
    plain = gradients()
    strided = gradients(
        out=out.transpose(1, 2).contiguous().transpose(1, 2),
        softmax_lse=lse.transpose(1, 2).contiguous().transpose(1, 2),
    )
    for name in names:
        assert_same_bits(name, strided[name], plain[name])
