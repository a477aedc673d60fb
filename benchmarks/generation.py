"""Tokens per second of Transformers' generation, with our attention and with torch's SDPA.

LOCAL_KERNELS=org/flash-attn-norm=$PWD/build HF_HUB_OFFLINE=1 \\
    python -m benchmarks.generation [--layers 28] [--hidden-size 1024] [--requests 64] [--out NAME]

A Qwen3 of random weights answers requests of several lengths, greedily: by `generate_batch`
(continuous batching; on a GPU its decode steps are CUDA graphs that call flash_attn_with_kvcache),
and by `generate` on one batch with a static cache. The tokens of the last request are held against
the logits of the same weights in float32.
"""

import argparse
import time

import torch
from kernels import get_kernel
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
)

from benchmarks.record import write_record

REPO_ID = "org/flash-attn-norm"
OURS = f"{REPO_ID}@v2"  # the 2 turns block tables on


def make_model(options, implementation: str, dtype: torch.dtype):
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.05,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(options.device):  # drawn there: on a CPU it would take longer than the rest
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
    return model.to(dtype).eval()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def batched(model, prompts: list, options) -> tuple[float, list]:
    """Tokens per second from the first token on, after a call that captures; the tokens."""
    config = GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    longest = max(map(len, prompts)) + options.new_tokens
    sizes = ContinuousBatchingConfig(
        page_size=options.page_size,
        num_blocks=len(prompts) * (longest // options.page_size + 2),
        max_batch_tokens=1024,
        auto_switch_to_flash=False,
    )
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=sizes,
        record_timestamps=True,
    )
    times = [moment for output in outputs.values() for moment in output.timestamps]
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    tokens = [by_prompt[tuple(prompt)] for prompt in prompts]
    return len(times) / (max(times) - min(times)), tokens


def one_batch(model, options) -> float:
    """Tokens per second of `generate`, prompt included."""
    tokens = torch.randint(3, 32768, (options.batch_size, 512), device=options.device)
    settings = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    settings |= {"cache_implementation": "static", "disable_compile": True}
    for count in (4, options.new_tokens):
        synchronize(options.device)
        begin = time.perf_counter()
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            **settings,
        )
        synchronize(options.device)
    return tokens.shape[0] * options.new_tokens / (time.perf_counter() - begin)


def largest_gap(options, prompt: list, answer: list) -> tuple[float, float]:
    """How far the logit of a chosen token lies behind the largest, in float32; and how far those of
    a bfloat16 model with torch's attention lie from the ones in float32."""
    tokens = torch.tensor([[*prompt, *answer]], device=options.device)
    rows = slice(len(prompt) - 1, -1)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(options, "sdpa", dtype)
        with torch.no_grad():
            logits.append(model(tokens).logits[0, rows].float())
        del model
    exact, rounded = logits
    chosen = exact.gather(1, torch.tensor(answer, device=options.device)[:, None])[:, 0]
    gap = (exact.max(dim=-1).values - chosen).max()
    return gap.item(), (rounded - exact).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--longest-prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", help="name of a record in benchmarks/results/")
    options = parser.parse_args()

    kernel = get_kernel(REPO_ID, revision="v2")
    step = max(options.longest_prompt // options.requests, 1)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 32768, (step * (index + 1),), generator=generator).tolist()
        for index in range(options.requests)
    ]
    figures, answers = [], {}
    for name, implementation in (("ours", OURS), ("sdpa", "sdpa")):
        model = make_model(options, implementation, torch.bfloat16)
        in_batches, answers[name] = batched(model, prompts, options)
        figures.append({"what": "generate_batch", "attention": name, "tokens_per_s": in_batches})
        static = one_batch(model, options)
        figures.append({"what": "generate, static", "attention": name, "tokens_per_s": static})
        del model
    pairs = [
        (one, other)
        for first, second in zip(*answers.values())
        for one, other in zip(first, second)
    ]
    same = sum(one == other for one, other in pairs) / len(pairs)
    figures.append({"what": "tokens of generate_batch that agree", "share": same})
    for name, answer in answers.items():
        gap, error = largest_gap(options, prompts[-1], answer[-1])
        figure = {"what": "logit of a chosen token behind the largest", "attention": name}
        figures.append({**figure, "gap": gap, "error_of_bfloat16": error})
    for figure in figures:
        print(figure)
    if options.out:
        print(write_record(options.out, kernel, torch.device(options.device), figures))


if __name__ == "__main__":
    main()
