"""Tokens per second of Transformers' generation with our attention, torch's SDPA and eager, and
whether each chooses the tokens that float32 chooses.

    LOCAL_KERNELS=org/flash-attn-norm=$PWD/build HF_HUB_OFFLINE=1 \\
        python -m benchmarks.generation --out generation_cuda

A Qwen3 of random weights (benchmarks.retrieving_model) answers greedily: by `generate` on one
batch, with a dynamic and with a static cache (not compiled), and by `generate_batch` (continuous
batching; on a GPU, and with our attention, its steps are CUDA graphs and those that only decode
call flash_attn_with_kvcache on the pages of the cache).

The same weights in float32 with eager attention then read prompt and answer at once, and so does
eager attention in the model's own dtype: the largest difference of their logits in a text is what
that dtype errs by there. Where float32's largest logit leads by more than twice as much the token
must be float32's (it is `covered`). Attention that is made wrong on purpose must fail that check.
The command fails where ours is wrong, where less than 0.95 of the tokens are covered, or where
wrong attention passes. About one minute on an H200.
"""

import argparse
import contextlib
import functools
import logging
import time
from typing import Any

import torch
from kernels import get_kernel
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    modeling_flash_attention_utils,
)
from transformers.utils import logging as transformers_logging

from benchmarks.record import write_record
from benchmarks.retrieving_model import make_model, random_prompts

REPO_ID = "org/flash-attn-norm"
# The 3 turns block tables on, as a 2 does.
IMPLEMENTATIONS = {"ours": f"{REPO_ID}@v3", "sdpa": "sdpa", "eager": "eager"}
LEAST_COVERED = 0.95
LEFT_OUT = 64  # rows of the cache: a page
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def now(options) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_batch(model, prompts: list, cache: str, options) -> tuple[float, list]:
    """Tokens per second of `generate`, prompt included, and each row's new tokens."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    tokens = torch.tensor(prompts, device=options.device)
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


class Reader:
    """Reads a prompt and its answer at once, in float32 and in the dtype of a model."""

    def __init__(self, options) -> None:
        self.exact_model = make_model(options, "eager", torch.float32)
        self.models: dict = {}
        self.options = options
        self.known: dict = {}

    def eager_model(self, dtype: str):
        if dtype not in self.models:
            self.models[dtype] = make_model(self.options, "eager", DTYPES[dtype])
        return self.models[dtype]

    def read(self, prompt: list, answer: list, dtype: str) -> tuple:
        """Float32's tokens, by how much the logit of each leads, and the largest error of a logit
        in that dtype; of a text that was read before, what it gave then."""
        text = (dtype, *prompt, *answer)
        if text not in self.known:
            exact = logits_of_answer(self.exact_model, prompt, answer)
            rounded = logits_of_answer(self.eager_model(dtype), prompt, answer)
            first, second = exact.topk(2, dim=-1).values.unbind(-1)
            error = (rounded - exact).abs().max().item()
            self.known[text] = exact.argmax(dim=-1).tolist(), (first - second).tolist(), error
        return self.known[text]


def logits_of_answer(model, prompt: list, answer: list) -> torch.Tensor:
    """(new tokens, vocabulary), float32: what each token of the answer was chosen by."""
    tokens = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.no_grad():
        logits = model(tokens, use_cache=False, logits_to_keep=len(answer) + 1).logits
    return logits[0, :-1].float()


def check_tokens(reader: Reader, prompts: list, answers: list, dtype: str) -> dict:
    """How many tokens are float32's, how many must be, and how many of these are not. An answer
    all of whose tokens are float32's is the one that float32 gives."""
    equal, covered, wrong, whole, errors = 0, 0, 0, 0, []
    for prompt, answer in zip(prompts, answers):
        tokens, leads, error = reader.read(prompt, answer, dtype)
        is_equal = [one == other for one, other in zip(answer, tokens)]
        is_covered = [lead > 2 * error for lead in leads]
        equal += sum(is_equal)
        covered += sum(is_covered)
        wrong += sum(must and not is_so for must, is_so in zip(is_covered, is_equal))
        whole += all(is_equal)
        errors.append(error)
    tokens = sum(map(len, answers))
    return {
        "tokens": tokens,
        "share_of_float32": round(equal / tokens, 4),
        "answers_of_float32": round(whole / len(answers), 4),
        "share_covered": round(covered / tokens, 4),
        "wrong": wrong,
        "largest_error": round(max(errors), 4),
    }


@contextlib.contextmanager
def flatter_softmax(kernel, model):
    """The scale of the scores is 3% too small."""
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.scaling *= 0.97
    try:
        yield
    finally:
        for module in modules:
            module.scaling /= 0.97


@contextlib.contextmanager
def page_left_out(kernel, model):
    """A step that decodes does not see the newest rows of the cache but its own."""
    function = kernel.flash_attn_func

    @functools.wraps(function)  # Transformers reads the signature
    def attention(q, k, v, *arguments, **keywords):
        if q.shape[1] == 1:
            k, v = (torch.cat([x[:, : -LEFT_OUT - 1], x[:, -1:]], dim=1) for x in (k, v))
        return function(q, k, v, *arguments, **keywords)

    kernel.flash_attn_func = attention
    modeling_flash_attention_utils._loaded_implementation = None  # it keeps the functions
    try:
        yield
    finally:
        kernel.flash_attn_func = function
        modeling_flash_attention_utils._loaded_implementation = None


FAULTS = {"softmax 3% flatter": flatter_softmax, f"{LEFT_OUT} rows left out": page_left_out}


def be_quiet() -> None:
    """Only errors: both remark on each call that no token ends an answer, and that graphs stay."""
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--sharpness", type=float, default=1.2, help="variance of the scores")
    parser.add_argument(
        "--second-choice", type=float, default=0.35, help="share of the softmax that it beats"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--longest-prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", help="name of a record in benchmarks/results/")
    return parser.parse_args(arguments)


def runs() -> list:
    """(way, attention, dtype, fault): with eager first, the slowest last."""
    plain = [
        (way, name, "bfloat16", None)
        for name in ("eager", "ours", "sdpa")
        for way in ("dynamic", "static")
    ]
    ours = [("continuous", "ours", "bfloat16", None)]
    ours += [("dynamic", "ours", "bfloat16", fault) for fault in FAULTS]
    ours += [(way, "ours", "float16", None) for way in ("dynamic", "static", "continuous")]
    return [*plain[:4], *ours, *plain[4:], ("continuous", "sdpa", "bfloat16", None)]


def measure(kernel, options, chosen_runs: list, report) -> list:
    """One figure a run, all that there are given to `report` each time."""
    batch, requests = random_prompts(options)
    prompts = {"dynamic": batch, "static": batch, "continuous": requests}
    reader = Reader(options)
    models: dict = {}
    figures = []
    for way, name, dtype, fault in chosen_runs:
        if (name, dtype) not in models:
            models = {(name, dtype): make_model(options, IMPLEMENTATIONS[name], DTYPES[dtype])}
        model = models[name, dtype]
        with FAULTS[fault](kernel, model) if fault else contextlib.nullcontext():
            if way == "continuous":
                is_captured = name == "ours" and options.device == "cuda"
                rate, answers = continuous(model, requests, is_captured, options)
            else:
                rate, answers = one_batch(model, batch, way, options)
        figure = {"way": way, "attention": name, "dtype": dtype, "fault": fault}
        figure["tokens_per_s"] = round(rate)
        figures.append(figure | check_tokens(reader, prompts[way], answers, dtype))
        report(figures)
    return figures


def failures(figures: list) -> list:
    """What is not as it must be, in words."""
    texts = []
    for figure in figures:
        name = ", ".join(str(figure[key]) for key in ("way", "attention", "dtype"))
        if figure["fault"] is not None:
            if figure["wrong"] == 0:
                texts.append(f"{name}: {figure['fault']}, and nothing tells")
        elif figure["attention"] == "ours" and figure["wrong"]:
            texts.append(f"{name}: {figure['wrong']} tokens are not float32's")
        if figure["fault"] is None and figure["share_covered"] < LEAST_COVERED:
            texts.append(f"{name}: only {figure['share_covered']} of the tokens are covered")
    return texts


def main() -> None:
    options = parse_arguments()
    be_quiet()
    started = time.perf_counter()
    kernel = get_kernel(REPO_ID, revision="v3", trust_remote_code=True)

    def report(figures: list) -> None:
        print(f"{time.perf_counter() - started:5.1f} s", figures[-1], flush=True)
        if options.out:  # each time, so that a later run may fail
            write_record(options.out, kernel, torch.device(options.device), figures)

    texts = failures(measure(kernel, options, runs(), report))
    if texts:
        raise SystemExit("\n".join(texts))


if __name__ == "__main__":
    main()
