"""A Qwen3 of random weights whose next token is clear, and is for attention to find.

With weights drawn without order the largest logits lie closer together than bfloat16 rounds, so
that what a model answers says nothing about its attention. Here the same random numbers stand in
several places:

- A token's embedding is its own code and behind it the code of the token that it is to follow. In
  blocks of 32 tokens each follows the next one, the last one closing the circle. The last
  dimensions are left free for what attention finds.
- Each head's projection of queries reads the first part, its projection of keys the second one,
  both with the same random numbers: the query of a token meets the keys of the token that is to
  follow it. How far these scores rise above those of the other keys, the weights of the q and k
  norms say; positions (RoPE) take a part of it away, the more the further off the key is.
- Values carry the own code, and the output projections of all heads and layers turn it into what
  the output layer knows the token by. No other path leads there.
- The output layer holds that against a second choice, another token of the block, of which it reads
  from the last token itself that it is due. Where the right rows of the cache got too little of the
  softmax, on average over all heads and layers, the second choice is taken.
- The MLPs are random, and small.

A row that is missing, from a wrong page or behind a wrong mask, loses its token; a softmax that is
a little too flat or too sharp moves the share of all heads together, whereas rounding moves each by
itself.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

BLOCK = 32  # tokens that follow each other in a circle
SECOND_CHOICE = 7  # further on in the block
NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM = 16, 8, 128
# An embedding is this much larger than a normal random number, so that small weights of the
# projections that add to it stay normal numbers in float16.
STREAM = 16.0
MLP_SIZE = 0.1  # of its weights, to those that Transformers would draw


def draw(*shape: int, fan_in: int) -> torch.Tensor:
    return torch.randn(*shape) / fan_in**0.5


def neighbours(tokens: torch.Tensor, distance: int) -> torch.Tensor:
    """Tokens so far on in the same block."""
    return tokens // BLOCK * BLOCK + (tokens + distance) % BLOCK


@torch.no_grad()
def arrange_attention(attention, sharpness: float, found: torch.Tensor) -> None:
    """`found` (free dimensions, code size): from a code to what the output layer knows it by."""
    hidden_size = attention.o_proj.out_features
    num_free, code_size = found.shape
    group_size = NUM_HEADS_Q // NUM_HEADS_KV
    reader = draw(NUM_HEADS_KV, HEAD_DIM, code_size, fan_in=code_size)
    values = draw(NUM_HEADS_KV, HEAD_DIM, code_size, fan_in=code_size)
    none = torch.zeros(NUM_HEADS_KV, HEAD_DIM, num_free)
    query = torch.cat([reader, 0 * reader, none], dim=-1).repeat_interleave(group_size, dim=0)
    attention.q_proj.weight.copy_(query.flatten(0, 1))
    attention.k_proj.weight.copy_(torch.cat([0 * reader, reader, none], dim=-1).flatten(0, 1))
    attention.v_proj.weight.copy_(torch.cat([values, 0 * values, none], dim=-1).flatten(0, 1))
    back = torch.einsum("fc,ndc->fnd", found, values).repeat_interleave(group_size, dim=1)
    back = back.reshape(num_free, -1) * (code_size / (NUM_HEADS_Q * HEAD_DIM))
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[hidden_size - num_free :] = back
    attention.q_norm.weight.fill_(sharpness**0.5)
    attention.k_norm.weight.fill_(sharpness**0.5)


@torch.no_grad()
def arrange(model, options) -> None:
    config = model.config
    code_size = 3 * config.hidden_size // 8
    num_free = config.hidden_size - 2 * code_size
    tokens = torch.arange(config.vocab_size)
    codes = torch.randn(config.vocab_size, code_size)
    parts = [codes, codes[neighbours(tokens, 1)], torch.zeros(config.vocab_size, num_free)]
    model.model.embed_tokens.weight.copy_(STREAM * torch.cat(parts, dim=-1))
    found = draw(num_free, code_size, fan_in=code_size)
    # Scaled so that the whole softmax in the right rows, in all layers, gives a logit of 16.
    known = codes @ found.T / num_free * 16
    second = codes[neighbours(tokens, -SECOND_CHOICE)] / code_size * 16 * options.second_choice
    model.lm_head.weight.copy_(torch.cat([second, 0 * second, known], dim=-1))
    for layer in model.model.layers:
        arrange_attention(layer.self_attn, options.sharpness, found)
        layer.self_attn.o_proj.weight.mul_(STREAM / config.num_hidden_layers)
        layer.mlp.down_proj.weight.mul_(STREAM * MLP_SIZE)


def make_model(options, implementation: str, dtype: torch.dtype):
    """The same weights, rounded to bfloat16, in every call."""
    config = Qwen3Config(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=NUM_HEADS_Q,
        num_key_value_heads=NUM_HEADS_KV,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},  # that of Qwen3
        initializer_range=0.02,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(options.device):  # drawn there: on a CPU it would take longer than the rest
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=implementation
        )
        arrange(model, options)
    return model.to(torch.bfloat16).to(dtype).eval()


def random_prompt(length: int, times: int, vocab_size: int, generator) -> list:
    """Whole blocks, each token about `times` times, shuffled: both choices always stand there."""
    blocks = torch.randperm(vocab_size // BLOCK, generator=generator)
    blocks = blocks[: max(1, length // (BLOCK * times))]
    tokens = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    tokens = tokens.repeat(-(-length // len(tokens)))[:length]
    return tokens[torch.randperm(length, generator=generator)].tolist()


def random_prompts(options) -> tuple[list, list]:
    """A batch of prompts of one length, and a list of prompts of many."""
    generator = torch.Generator().manual_seed(1)
    step = max(options.longest_prompt // options.requests, 1)
    same = [options.longest_prompt] * options.batch_size
    different = [step * (index + 1) for index in range(options.requests)]

    def prompts(lengths: list) -> list:
        return [
            random_prompt(length, (1, 2, 4)[index % 3], options.vocab_size, generator)
            for index, length in enumerate(lengths)
        ]

    return prompts(same), prompts(different)
