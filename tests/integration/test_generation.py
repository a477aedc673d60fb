"""Greedy generation with our attention gives eager's tokens."""

import functools

import pytest
import torch
from integration.models import (
    ATTENTION,
    ATTENTION_WITH_CACHE,
    accept_in_gpt_oss,
    make_model,
    random_tokens,
)
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    modeling_flash_attention_utils,
)
from transformers.generation.continuous_batching import initialization

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


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_static_cache(family, kernel):
    """Its keys are all that it has room for; those behind the last one are masked."""
    tokens = random_tokens(2, 11)
    results = [
        make_model(family, implementation).generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            cache_implementation="static",
        )
        for implementation in (ATTENTION, ATTENTION_WITH_CACHE, "eager")
    ]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])


@pytest.fixture
def cached_calls(kernel, monkeypatch) -> list:
    """The calls of flash_attn_with_kvcache, as Transformers makes them; it reads the signature."""
    calls, function = [], kernel.flash_attn_with_kvcache

    @functools.wraps(function)
    def record(*arguments, **keywords):
        calls.append(keywords)
        return function(*arguments, **keywords)

    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(kernel, "flash_attn_with_kvcache", record)
    return calls


@pytest.mark.parametrize("page_size", [16, 5])
def test_continuous_batching_with_block_tables(page_size, cached_calls, monkeypatch):
    """Transformers asks for a GPU before it uses block tables; the rest is its own code."""
    monkeypatch.setattr(
        initialization, "ensure_decode_fast_path_is_available", lambda *arguments: None
    )
    sizes = {"page_size": page_size, "max_blocks_per_request": 12}
    check_continuous_batching("qwen3", ATTENTION_WITH_CACHE, **sizes)
    assert len(cached_calls) >= NEW_TOKENS
    assert all("block_table" in keywords for keywords in cached_calls)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_continuous_batching(family, kernel):
    """generate_batch packs requests of different lengths, prompts and single tokens together."""
    check_continuous_batching(family, ATTENTION, page_size=16)


def check_continuous_batching(family, implementation, **sizes):
    prompts = [random_tokens(length).tolist() for length in (3, 17, 9, 30)]
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Without these, the cache takes most of the machine's memory.
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, **sizes)
    outputs = make_model(family, implementation).generate_batch(
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
