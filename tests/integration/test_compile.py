"""torch.compile of whole models and of layers, from the build that the loader loaded.

Most cases use the backend that runs the traced graph as it is: it exercises fakes, the traced
backward and graph breaks as the real one does, in a fraction of its time.
"""

import pytest
import torch
from integration.models import (
    ATTENTION,
    accept_in_gpt_oss,
    assert_no_worse,
    make_model,
    random_tokens,
    run,
)
from integration.test_kernel_layers import replace_rms_norm
from kernels import Mode
from transformers.utils import logging

TRACED = "aot_eager"
INDUCTOR = "inductor"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """No graphs of other tests; Transformers' own remark about float32 inputs breaks no graph."""
    remark = logging.get_logger("transformers.modeling_flash_attention_utils").warning_once
    torch.compiler.reset()
    with torch._dynamo.config.patch(ignore_logging_functions={remark}):
        yield
    torch.compiler.reset()


def assert_compiled_equals_eager_call(model, backend: str, **inputs) -> None:
    """The compiled model against the same model uncompiled, without a single graph break."""
    expected = run(model, **inputs)
    compiled = run(torch.compile(model, backend=backend, fullgraph=True), **inputs)
    assert expected.gradients.keys() == {
        name.removeprefix("_orig_mod.") for name in compiled.gradients
    }
    torch.testing.assert_close(compiled.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for name, gradient in expected.gradients.items():
        actual = compiled.gradients.get(name, compiled.gradients.get(f"_orig_mod.{name}"))
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.float32),
        ("gemma2", torch.bfloat16),
        ("gpt_oss", torch.bfloat16),  # its experts' float32 path does not compile on a CPU
    ],
)
def test_whole_model(family, dtype, kernel, monkeypatch):
    accept_in_gpt_oss(monkeypatch)
    model = make_model(family, ATTENTION, dtype)
    assert_compiled_equals_eager_call(model, TRACED, input_ids=random_tokens(2, 21))


def test_whole_model_with_our_norms_in_inductor(kernel):
    model = make_model("qwen3", ATTENTION, num_hidden_layers=1, layer_types=["full_attention"])
    model = replace_rms_norm(model, "LlamaRMSNorm", Mode.TRAINING | Mode.TORCH_COMPILE)
    assert_compiled_equals_eager_call(model, INDUCTOR, input_ids=random_tokens(2, 21))


def test_padding_free_model(kernel):
    """As padding-free collators call it; from position_ids alone, Transformers breaks the graph."""
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    cu_seqlens = torch.tensor([0, 8, 20], dtype=torch.int32)
    assert_compiled_equals_eager_call(
        make_model("qwen3", ATTENTION),
        TRACED,
        input_ids=random_tokens(1, 20),
        position_ids=position_ids,
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=12,
        max_length_k=12,
    )


@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_function_takes_maxima_as_int_and_tensor(as_tensor, kernel):
    """huggingface/transformers#35588"""
    cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    longest = torch.tensor(7) if as_tensor else 7
    q = torch.randn(10, 4, 16, requires_grad=True)
    k, v = torch.randn(2, 10, 2, 16).unbind()

    def call(q):
        return kernel.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )

    expected = call(q)
    actual = torch.compile(call, backend=TRACED, fullgraph=True)(q)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    probe = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad(actual, q, probe), torch.autograd.grad(expected, q, probe)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernelized_norm_compiles_to_the_same_values(dtype, kernel):
    """One step of the dtype at most between compiled and plain, in training as in inference
    (huggingface/transformers#46039)."""
    model = make_model("qwen3", "eager", dtype)
    model = replace_rms_norm(model, "LlamaRMSNorm", Mode.TRAINING | Mode.TORCH_COMPILE)
    norm = model.model.layers[0].input_layernorm
    x = torch.randn(3, 7, model.config.hidden_size).to(dtype)
    compiled = torch.compile(norm, backend=INDUCTOR, fullgraph=True)
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(compiled(x), norm(x), rtol=epsilon, atol=0)


def test_sequence_length_may_change(kernel):
    """New lengths recompile at most into a dynamic graph, and stay right."""
    model = make_model("llama", ATTENTION)
    compiled = torch.compile(model, backend=TRACED, fullgraph=True)
    for seqlen in (9, 16, 23, 31):
        tokens = random_tokens(2, seqlen)
        torch.testing.assert_close(
            compiled(tokens, use_cache=False).logits,
            model(tokens, use_cache=False).logits,
            rtol=1e-4,
            atol=1e-5,
        )


def test_gradient_checkpointing_under_compile(kernel):
    model = make_model("qwen3", ATTENTION).train()
    tokens = random_tokens(2, 21)
    plain = run(make_model("qwen3", "eager").train(), input_ids=tokens)
    exact = run(make_model("qwen3", "eager", torch.float64).train(), input_ids=tokens)
    model.gradient_checkpointing_enable()
    ours = run(torch.compile(model, backend=TRACED), input_ids=tokens)
    ours.gradients = {n.removeprefix("_orig_mod."): g for n, g in ours.gradients.items()}
    assert_no_worse(ours, plain, exact)
