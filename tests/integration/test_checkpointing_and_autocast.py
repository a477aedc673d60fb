"""Recomputation in the backward, and mixed precision."""

import pytest
import torch
from integration.models import ATTENTION, assert_no_worse, make_model, random_tokens, run
from integration.test_kernel_layers import replace_rms_norm
from kernels import Mode

TOKENS = random_tokens(2, 33)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing(dropout, use_reentrant, kernel):
    """The recomputed forward is the first one, bit for bit, its dropout mask included."""
    outcomes = []
    for checkpointing in (False, True):
        model = make_model("qwen3", ATTENTION, attention_dropout=dropout)
        model = replace_rms_norm(model, "LlamaRMSNorm", Mode.TRAINING).train()
        if checkpointing:
            arguments = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        torch.manual_seed(3)
        outcomes.append(run(model, input_ids=TOKENS))
    assert torch.equal(outcomes[0].logits, outcomes[1].logits)
    assert outcomes[0].gradients.keys() == outcomes[1].gradients.keys()
    for name, gradient in outcomes[0].gradients.items():
        assert torch.equal(gradient, outcomes[1].gradients[name]), name


def test_checkpointing_with_frozen_norms(kernel):
    """Frozen weights get no gradient; everything before and after them still does."""
    outcomes = []
    for frozen in (False, True):
        model = replace_rms_norm(make_model("qwen3", ATTENTION), "LlamaRMSNorm", Mode.TRAINING)
        model.train().gradient_checkpointing_enable()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and "norm" in name))
        outcomes.append(run(model, input_ids=TOKENS))
    trained, frozen = outcomes
    assert frozen.gradients.keys() == {n for n in trained.gradients if "norm" not in n}
    for name, gradient in frozen.gradients.items():
        assert torch.equal(gradient, trained.gradients[name]), name


def test_autocast(kernel):
    """Under autocast, q and k leave their norms in float32 and meet a bfloat16 v."""

    def outcome(implementation: str, dtype: torch.dtype, enabled: bool):
        model = make_model("qwen3", implementation, dtype).train()
        if implementation == ATTENTION:
            model = replace_rms_norm(model, "LlamaRMSNorm", Mode.TRAINING)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return run(model, input_ids=TOKENS)

    assert_no_worse(
        outcome(ATTENTION, torch.float32, enabled=True),
        outcome("eager", torch.float32, enabled=True),
        outcome("eager", torch.float64, enabled=False),
    )


def test_mixed_dtypes_are_refused_with_the_cure(kernel):
    """What callers outside Transformers meet when their norms return float32 under autocast."""
    q = k = torch.randn(1, 5, 2, 16)
    with pytest.raises(ValueError, match="dtype") as error:
        kernel.flash_attn_func(q, k, k.bfloat16())
    message = str(error.value)
    assert message.count("float32") >= 2
    assert "bfloat16" in message
    assert "autocast" in message or ".to(" in message
