"""Tiny Transformers models of several families, and the comparison of one run with another."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

# A machine that only runs the GPU tests need not have it; `make test` always does.
pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssPreTrainedModel,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

ATTENTION = "org/flash-attn-norm@v1"
# The 2 makes Transformers use flash_attn_with_kvcache, with block tables, in continuous batching.
ATTENTION_WITH_CACHE = "org/flash-attn-norm@v2"
VOCAB_SIZE = 96
SLIDING_WINDOW = 8  # shorter than the sequences below, so that it cuts

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
}

# What each family adds to plain causal attention.
CONFIGS: dict[str, PreTrainedConfig] = {
    # grouped heads 7:1, RMSNorm on queries and keys
    "qwen3": Qwen3Config(num_attention_heads=14, num_key_value_heads=2, head_dim=16, **_COMMON),
    # grouped heads 3:1
    "llama": LlamaConfig(num_attention_heads=6, num_key_value_heads=2, head_dim=16, **_COMMON),
    # softcap, a window in every other layer, a softmax scale that is not head_dim ** -0.5
    "gemma2": Gemma2Config(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        sliding_window=SLIDING_WINDOW,
        **_COMMON,
    ),
    # multi-query, RMSNorm with 1 + weight on queries and keys, window
    "gemma3": Gemma3TextConfig(
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=24,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        **_COMMON,
    ),
    # learnable attention sinks with gradients, window
    "gpt_oss": GptOssConfig(
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        num_local_experts=2,
        num_experts_per_tok=2,
        **_COMMON,
    ),
    # norms with weights stored around zero, an output gate, rotary on a quarter of the head dim
    "qwen3_5": Qwen3_5TextConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["full_attention", "full_attention"],
        **_COMMON,
    ),
    # query/key head dim 24, value head dim 16
    "deepseek_v3": DeepseekV3Config(
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=2,
        **_COMMON,
    ),
}


def accept_in_gpt_oss(monkeypatch) -> None:
    """Lets gpt-oss use our attention.

    The class lists the flash implementations it knows and silently replaces any other one; a user
    appends to that list, as here.
    """
    known = [*GptOssPreTrainedModel._compatible_flash_implementations, ATTENTION]
    monkeypatch.setattr(GptOssPreTrainedModel, "_compatible_flash_implementations", known)


def make_model(
    family: str, attn_implementation: str, dtype: torch.dtype = torch.float32, **overrides
) -> PreTrainedModel:
    """The family's model with the same random weights in every call, in evaluation mode.

    float64 holds the bits of ``weights_dtype`` (an override; default float32), so that it is the
    exact reference of a model in that dtype.
    """
    weights_dtype = overrides.pop("weights_dtype", torch.float32)
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **overrides})
    torch.manual_seed(0)
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in weights.parameters():
            if parameter.dim() == 1:  # norms and sinks start constant, which would hide mistakes
                parameter += 0.3 * torch.randn_like(parameter)
    if (
        family == "gpt_oss" and dtype == torch.float64
    ):  # torch's grouped product of the experts has no float64
        config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attn_implementation
    )
    assert model.config._attn_implementation == attn_implementation
    model.load_state_dict(weights.to(weights_dtype).state_dict())
    return model.eval()


@dataclass
class Outcome:
    """What one forward and backward pass gave, in float64."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]
    bits: int  # of the numbers that the model computed with

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"logits": self.logits, **self.gradients}


def random_tokens(*shape: int) -> torch.Tensor:
    """Token ids without the special ones; int64."""
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def run(model: PreTrainedModel, **inputs) -> Outcome:
    """Forward and backward of one call; logits (batch_size * seqlen, vocab_size)."""
    return finish(model, model(use_cache=False, **inputs).logits.flatten(0, 1))


def run_one_by_one(model: PreTrainedModel, sequences: Iterable[torch.Tensor]) -> Outcome:
    """Each sequence of tokens in a call of its own: nothing to pad and nothing to keep apart."""
    logits = [model(tokens[None], use_cache=False).logits[0] for tokens in sequences]
    return finish(model, torch.cat(logits))


def finish(model: PreTrainedModel, logits: torch.Tensor) -> Outcome:
    """Backward from a fixed random projection of the logits (rows, vocab_size)."""
    generator = torch.Generator().manual_seed(2)
    probe = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (logits.double() * probe.to(logits.device)).mean().backward()
    gradients = {
        name: parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Outcome(logits.detach().double(), gradients, bits=8 * logits.dtype.itemsize)


def assert_no_worse(ours: Outcome, plain: Outcome, exact: Outcome) -> None:
    """Each of our errors is at most twice eager's at the same dtype, both against float64.

    In float32 the largest error of each tensor counts. In 16 bits the largest of thirty tensors,
    some of a few elements, is a matter of luck after two layers of rounding; there the errors
    count as a whole, each tensor relative to its own norm.
    """
    assert ours.gradients.keys() == plain.gradients.keys() == exact.gradients.keys()
    a, b, reference = ours.tensors(), plain.tensors(), exact.tensors()
    if plain.bits == 16:
        error, allowed = _relative_error(a, reference), 2 * _relative_error(b, reference)
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
        return
    for name, tensor in reference.items():
        error = (a[name] - tensor).abs().max()
        allowed = 2 * (b[name] - tensor).abs().max() + 1e-5
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def _relative_error(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Root of the mean over the tensors of (norm of the error / norm of the tensor) squared."""
    squares = [((actual[n] - e).norm() / e.norm()).square().item() for n, e in exact.items()]
    return statistics.fmean(squares) ** 0.5
