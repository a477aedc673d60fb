"""Transformers with our attention against its own eager attention, forward and backward."""

import pytest
import torch
from integration.models import (
    ATTENTION,
    CONFIGS,
    Outcome,
    accept_in_gpt_oss,
    assert_no_worse,
    finish,
    make_model,
    random_tokens,
    run,
    run_one_by_one,
)

SEQLEN = 37


@pytest.fixture(params=list(CONFIGS))
def family(request, monkeypatch, kernel) -> str:
    accept_in_gpt_oss(monkeypatch)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_batch(family, dtype):
    tokens = random_tokens(2, SEQLEN)
    ours = run(make_model(family, ATTENTION, dtype), input_ids=tokens)
    plain = run(make_model(family, "eager", dtype), input_ids=tokens)
    exact = make_model(family, "eager", torch.float64, weights_dtype=dtype)
    assert_no_worse(ours, plain, run(exact, input_ids=tokens))


def assert_like_separate_sequences(family: str, ours: Outcome, sequences: list) -> None:
    plain, exact = (
        run_one_by_one(make_model(family, "eager", dtype), sequences)
        for dtype in (torch.float32, torch.float64)
    )
    assert_no_worse(ours, plain, exact)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family, side):
    """A padded batch gives what its sequences give alone; the padding's own rows count nowhere."""
    tokens = random_tokens(3, SEQLEN)
    mask = torch.zeros(3, SEQLEN, dtype=torch.long)
    for row, length in enumerate((SEQLEN, 20, 1)):
        mask[row, :length] = 1
    if side == "left":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model, keep = make_model(family, ATTENTION), mask.bool()
    output = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    sequences = [row[kept] for row, kept in zip(tokens, keep, strict=True)]
    assert_like_separate_sequences(family, finish(model, output.logits[keep]), sequences)


def test_packed_position_ids(family):
    """Several sequences in one row, told apart by position_ids alone: max_seqlen is a tensor."""
    lengths = (5, 20, 1, 11)
    tokens = random_tokens(1, sum(lengths))
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    ours = run(make_model(family, ATTENTION), input_ids=tokens, position_ids=position_ids)
    assert_like_separate_sequences(family, ours, tokens[0].split(lengths))


def test_explicit_cu_seqlens(kernel):
    """Padding-free collators hand over cu_seq_lens_q/k and integer maxima."""
    lengths = (9, 16, 2)
    tokens = random_tokens(1, sum(lengths))
    cu_seqlens = torch.tensor([0, 9, 25, 27], dtype=torch.int32)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    maxima = {"max_length_q": 16, "max_length_k": 16}
    model = make_model("qwen3", ATTENTION)
    explicit = run(
        model,
        input_ids=tokens,
        position_ids=position_ids,
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        **maxima,
    )
    implied = run(model, input_ids=tokens, position_ids=position_ids)
    torch.testing.assert_close(explicit.logits, implied.logits, rtol=0, atol=0)


def test_deterministic_environment_flag(kernel, monkeypatch):
    """FLASH_ATTENTION_DETERMINISTIC=1 reaches the kernel: repeated backwards agree bit for bit."""
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    model = make_model("llama", ATTENTION)
    tokens = random_tokens(2, SEQLEN)
    first = run(model, input_ids=tokens)
    for _ in range(3):
        again = run(model, input_ids=tokens)
        for name, gradient in first.gradients.items():
            assert torch.equal(gradient, again.gradients[name]), name


@pytest.mark.parametrize(
    "name",
    [
        "org/flash-attn-norm",
        "org/flash-attn-norm@v1",
        "org/flash-attn-norm@v3",
        "org/flash-attn-norm@v1:flash_attn_func",
        "org/flash-attn-norm@v1:flash_attn_varlen_func",
        "org/flash-attn-norm:flash_attn_func",
    ],
)
def test_names_that_users_type(name, kernel, monkeypatch):
    """Every spelling reaches our functions, not another implementation of the same name
    (huggingface/trl#6984)."""
    import transformers.modeling_flash_attention_utils as utils

    model = make_model("qwen3", name)
    expected = make_model("qwen3", "eager")(random_tokens(1, 9)).logits
    torch.testing.assert_close(model(random_tokens(1, 9)).logits, expected, atol=1e-4, rtol=0)
    assert utils._flash_fn is kernel.flash_attn_func
    assert utils._flash_varlen_fn is kernel.flash_attn_varlen_func


def test_every_feature_is_seen_by_transformers(kernel):
    """Transformers reads the packed signature once; a name missing there is dropped silently."""
    import inspect

    for function in (kernel.flash_attn_func, kernel.flash_attn_varlen_func):
        names = inspect.signature(function).parameters
        wanted = {"dropout_p", "deterministic", "window_size", "softcap", "s_aux"}
        assert wanted <= names.keys()
        kinds = {parameter.kind for parameter in names.values()}
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def test_attention_dropout(kernel):
    """Training with attention_dropout draws from torch's generator: same seed, same result."""
    model = make_model("llama", ATTENTION, attention_dropout=0.3).train()
    tokens = random_tokens(2, SEQLEN)
    outcomes = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outcomes.append(run(model, input_ids=tokens))
    assert torch.equal(outcomes[0].logits, outcomes[1].logits)
    assert not torch.equal(outcomes[0].logits, outcomes[2].logits)
