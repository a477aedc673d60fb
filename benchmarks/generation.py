"""Tokens per second of Transformers' generation with our attention, torch's SDPA and eager, and
whether each chooses the tokens that it should.

    LOCAL_KERNELS=org/flash-attn-norm=$PWD/build HF_HUB_OFFLINE=1 \\
        python -m benchmarks.generation --out generation_cuda

A Qwen3 of random weights in bfloat16 answers greedily: by `generate` on one batch, with a dynamic
and with a static cache (not compiled), and by `generate_batch` (continuous batching; on a GPU, and
with our attention, its steps are CUDA graphs and those that only decode call
flash_attn_with_kvcache on the pages of the cache).

All tokens are held against the same weights in float32 with eager attention, which reads prompt and
answer at once: a chosen token's logit may lie behind the largest one by twice the error of
bfloat16's logits. About one minute on an H200.
"""

import argparse
import logging
import time
from typing import Any

import torch
from kernels import get_kernel
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from benchmarks.record import write_record

REPO_ID = "org/flash-attn-norm"
# The 3 turns block tables on, as a 2 does.
IMPLEMENTATIONS = {"ours": f"{REPO_ID}@v3", "sdpa": "sdpa", "eager": "eager"}
VOCAB_SIZE = 32768


def make_model(options, implementation: str, dtype: torch.dtype):
    """The same weights, rounded to bfloat16, in every call."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
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


def random_prompts(options) -> tuple[torch.Tensor, list]:
    """A batch of prompts of one length, and a list of prompts of many."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(3, VOCAB_SIZE, shape, generator=generator)

    step = max(options.longest_prompt // options.requests, 1)
    requests = [draw(step * (index + 1)).tolist() for index in range(options.requests)]
    return draw(options.batch_size, options.longest_prompt), requests


def now(options) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_batch(model, prompts: torch.Tensor, cache: str, options) -> tuple[float, list]:
    """Tokens per second of `generate`, prompt included, and each row's new tokens."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    tokens = prompts.to(options.device)
    for count in (4, options.new_tokens):  # the first call settles
        started = now(options)
        answers = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            **settings,
        )
    rate = len(tokens) * options.new_tokens / (now(options) - started)
    return rate, answers[:, tokens.shape[1] :].tolist()


def continuous(model, requests: list, is_captured: bool, options) -> tuple[float, list]:
    """Tokens per second of `generate_batch` from the first token on, with graphs in a second call,
    for which all of them are there; and each request's new tokens."""
    config = GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    longest = max(map(len, requests)) + options.new_tokens
    sizes = ContinuousBatchingConfig(
        page_size=options.page_size,
        num_blocks=len(requests) * (longest // options.page_size + 2),
        max_batch_tokens=1024,
        allow_block_sharing=False,  # else the second call would find the prompts of the first
        auto_switch_to_flash=False,
    )
    turns = 2 if is_captured else 1
    for turn in range(turns):
        outputs = model.generate_batch(
            inputs=requests,
            generation_config=config,
            continuous_batching_config=sizes,
            record_timestamps=True,
            persistent_manager=turn + 1 < turns,
        )
    times = [moment for output in outputs.values() for moment in output.timestamps]
    answers = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return len(times) / (max(times) - min(times)), [answers[tuple(r)] for r in requests]


def logits_of_answer(model, prompt: list, answer: list) -> torch.Tensor:
    """(new tokens, vocabulary), float32: what each token of the answer was chosen by."""
    tokens = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.no_grad():
        logits = model(tokens, use_cache=False, logits_to_keep=len(answer) + 1).logits
    return logits[0, :-1].float()


def check_choices(exact_model, prompts: list, answers: list) -> tuple[float, float]:
    """How far the logit of a chosen token lies behind the largest at most, in float32; and the
    share of tokens that are the largest."""
    gaps = []
    for prompt, answer in zip(prompts, answers):
        logits = logits_of_answer(exact_model, prompt, answer)
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
        gaps.append(logits.max(dim=-1).values - chosen)
    gap = torch.cat(gaps)
    return gap.max().item(), (gap == 0).float().mean().item()


def error_of_bfloat16(exact_model, model, prompts: list, answers: list) -> float:
    """The largest error of a logit of the model in bfloat16."""
    errors = [
        logits_of_answer(model, prompt, answer) - logits_of_answer(exact_model, prompt, answer)
        for prompt, answer in zip(prompts, answers)
    ]
    return max(error.abs().max().item() for error in errors)


def be_quiet() -> None:
    """Only errors: both remark on each call that no token ends an answer, and that graphs stay."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest-prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", help="name of a record in benchmarks/results/")
    return parser.parse_args()


def runs() -> list:
    """(way, attention), those first that the others are compared with, the slowest last."""
    plain = [(way, name) for name in ("eager", "ours", "sdpa") for way in ("dynamic", "static")]
    return [*plain[:4], ("continuous", "ours"), *plain[4:], ("continuous", "sdpa")]


def main() -> None:
    options = parse_arguments()
    be_quiet()
    started = time.perf_counter()
    kernel = get_kernel(REPO_ID, revision="v3", trust_remote_code=True)
    batch, requests = random_prompts(options)
    prompts = {"dynamic": batch.tolist(), "static": batch.tolist(), "continuous": requests}
    exact_model = make_model(options, "eager", torch.float32)
    models: dict = {}
    figures, answers, allowed = [], {}, None
    for way, name in runs():
        if name not in models:
            models = {name: make_model(options, IMPLEMENTATIONS[name], torch.bfloat16)}
        model = models[name]
        if way == "continuous":
            rate, mine = continuous(model, requests, name == "ours", options)
        else:
            rate, mine = one_batch(model, batch, way, options)
        answers[way, name] = mine
        if allowed is None:
            allowed = 2 * error_of_bfloat16(exact_model, model, prompts[way], mine)
        gap, share = check_choices(exact_model, prompts[way], mine)
        figure = {"way": way, "attention": name, "tokens_per_s": round(rate)}
        figure |= {"largest_of_float32": round(share, 4), "behind_largest": round(gap, 4)}
        figure["allowed"] = round(allowed, 4)
        if (way, "eager") in answers:
            pairs = zip(mine, answers[way, "eager"])
            figure["answers_as_eager"] = sum(one == other for one, other in pairs) / len(mine)
        figures.append(figure)
        print(f"{time.perf_counter() - started:5.1f} s", figure, flush=True)
        if options.out:  # each time, so that a later run may fail
            write_record(options.out, kernel, torch.device(options.device), figures)


if __name__ == "__main__":
    main()
