"""Greedy generation with our attention gives eager's tokens."""

import pytest
import torch
from integration.models import ATTENTION, accept_in_gpt_oss, make_model, random_tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

NEW_TOKENS = 12  # beyond the sliding window of the models that have one


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate(family, padded, kernel, monkeypatch):
    """The cached decode has one query row and many keys: causal is aligned at the bottom right."""
    accept_in_gpt_oss(monkeypatch)
    tokens = random_tokens(2, 11)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :4] = 0
    results = [
        make_model(family, implementation).generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        for implementation in (ATTENTION, "eager")
    ]
    assert results[0].shape == (2, 11 + NEW_TOKENS)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_continuous_batching(family, kernel):
    """generate_batch packs requests of different lengths, prompts and single tokens together."""
    prompts = [random_tokens(length).tolist() for length in (3, 17, 9, 30)]
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Without these, the cache takes most of the machine's memory.
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)
    outputs = make_model(family, ATTENTION).generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=sizes
    )
    generated = {tuple(o.prompt_ids): o.generated_tokens for o in outputs.values()}
    assert len(generated) == len(prompts)
    eager = make_model(family, "eager")
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        alone = eager.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
        assert generated[tuple(prompt)] == alone[0, len(prompt) :].tolist()
