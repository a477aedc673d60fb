"""Trains a 1B-parameter model on one GPU with our attention and norms and with torch's own.

    PYTHONPATH=examples python -m benchmarks.training_step

writes benchmarks/results/training_cuda.json, anew after each part, in about 95 seconds on an H200:

- speed: tokens per second of whole steps, in eager mode.
- gradients: how far those of one step in bfloat16 lie from float32's.
- curves: the losses of 200 steps from the same weights on the same text. torch's runs differ in
  nothing (again), in the backend of attention (cudnn) or in where a norm rounds (rounding), which
  says how far runs part by rounding alone.

`--tiny` runs all of it in miniature, on a CPU too, and writes nothing.
"""

import argparse
import contextlib
import math
import time
from dataclasses import dataclass, replace
from statistics import fmean as mean
from typing import Optional

import torch
from kernels import get_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_distributed import (
    REPO_ID,
    Outcome,
    Training,
    batches,
    be_quiet,
    build_model,
    choose_device,
    clip_gradients,
    free_memory,
    make_optimizer,
    now,
    precision,
    train,
)

from benchmarks.curves import compare_curves, curve_figures
from benchmarks.record import write_record

PARTS = ("speed", "gradients", "curves")
SPEED = Training("1b", is_checkpointed=False)
SIZES = ((1, 2048), (4, 4096))  # (batch_size, seqlen)
CHECK = Training(
    "1b-wide",
    steps=200,
    batch_size=2,
    seqlen=1024,
    learning_rate=2e-5,
    is_checkpointed=False,
    is_head_in_float32=True,
)
TINY = Training(steps=6, batch_size=2, seqlen=64, is_in_bf16=False)
TRAINED_STEPS = 40  # before gradients are compared: attention is no longer uniform
COMPARED_BATCHES = 3


@dataclass(frozen=True)
class Contender:
    kernels: str  # as in train_distributed
    backend: Optional[SDPBackend] = None  # of torch's attention
    rounds_norms: bool = False  # torch's norms give the dtype of their input, as ours do

    def prepare(self, model: torch.nn.Module) -> None:
        if self.rounds_norms:
            round_norms(model)

    def attention(self, device: torch.device) -> contextlib.AbstractContextManager:
        if device.type == "cuda" and self.backend is not None:
            return sdpa_kernel(self.backend)
        return contextlib.nullcontext()


CONTENDERS = {
    "ours": Contender("ours"),
    "torch": Contender("torch", SDPBackend.FLASH_ATTENTION),
    "torch_again": Contender("torch", SDPBackend.FLASH_ATTENTION),
    "torch_cudnn": Contender("torch", SDPBackend.CUDNN_ATTENTION),
    "torch_rounding": Contender("torch", SDPBackend.CUDNN_ATTENTION, rounds_norms=True),
    "our_attention": Contender("attention"),
    "our_norms": Contender("norms", SDPBackend.FLASH_ATTENTION),
}
COMPARED = ("ours", "torch", "torch_cudnn", "torch_rounding", "our_attention", "our_norms")
FASTEST = ("ours", "torch", "torch_cudnn")
CURVES = ("ours", "torch", "torch_again", "torch_cudnn", "torch_rounding")


def make(contender: Contender, training: Training, device: torch.device):
    model = build_model(replace(training, kernels=contender.kernels), device)
    contender.prepare(model)
    return model


def round_norms(model: torch.nn.Module) -> None:
    """Under autocast Transformers' norms multiply with float32 weights and give float32 where q and
    k come in bfloat16; a model in bfloat16, as our norms, gives bfloat16."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(lambda _, inputs, out: out.to(inputs[0].dtype))


def loss_of(model, tokens: torch.Tensor, training: Training, **lengths) -> torch.Tensor:
    with precision(training, tokens.device):
        return model(input_ids=tokens, labels=tokens, use_cache=False, **lengths).loss


def lengths_of(tokens: torch.Tensor) -> dict:
    """What Transformers' collator for packed sequences gives a flash implementation. Without it
    a batch of one row makes each layer wait for the GPU to look at the positions."""
    batch_size, seqlen = tokens.shape
    ends = torch.arange(
        0, (batch_size + 1) * seqlen, seqlen, dtype=torch.int32, device=tokens.device
    )
    names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return {**names, "max_length_q": seqlen, "max_length_k": seqlen}


def seconds_of_step(model, optimizer, tokens, training, steps: int, **lengths) -> float:
    """Of one of several steps in a row, with nothing between them; one before to settle."""
    for step in range(steps + 1):
        if step == 1:
            started = now(tokens.device)
        loss_of(model, tokens, training, **lengths).backward()
        clip_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return (now(tokens.device) - started) / steps


def measure_speed(training: Training, sizes: tuple, device: torch.device) -> list:
    """All contenders in turn at each size."""
    models = {name: make(CONTENDERS[name], training, device) for name in FASTEST}
    optimizers = {name: make_optimizer(model, 1e-6) for name, model in models.items()}
    figures = []
    for batch_size, seqlen in sizes:
        tokens = next(batches(replace(training, batch_size=batch_size, seqlen=seqlen))).to(device)
        for name in FASTEST:
            cases = [("", {})]
            if name == "ours" and batch_size == 1:
                cases.append((", lengths given", lengths_of(tokens)))
            for suffix, lengths in cases:
                with CONTENDERS[name].attention(device):
                    seconds, extra = measured_step(
                        models[name], optimizers[name], tokens, training, lengths
                    )
                figures.append(
                    {
                        "speed_of": name + suffix,
                        "batch_size": batch_size,
                        "seqlen": seqlen,
                        "step_ms": round(1e3 * seconds, 2),
                        "tokens_per_s": round(batch_size * seqlen / seconds),
                        "activations_gb": round(extra / 1e9, 2),
                    }
                )
    return figures


def measured_step(model, optimizer, tokens, training, lengths: dict) -> tuple:
    """Seconds of a step, and how far its peak of memory rises over what all models hold."""
    seconds_of_step(model, optimizer, tokens, training, steps=1, **lengths)  # optimizer states
    held = 0
    if tokens.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    seconds = seconds_of_step(model, optimizer, tokens, training, steps=4, **lengths)
    peak = torch.cuda.max_memory_allocated() if tokens.device.type == "cuda" else 0
    return seconds, peak - held


def parameter_kind(name: str) -> str:
    """layers.3.mlp.up_proj.weight -> mlp.up_proj"""
    return ".".join(part for part in name.split(".")[1:-1] if not part.isdigit()).removeprefix(
        "layers."
    )


def gradients_by_name(model, tokens: torch.Tensor, training: Training) -> dict:
    loss_of(model, tokens, training).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def squared_errors(gradients: dict, exact: dict) -> dict:
    """By kind of parameter: mean over the layers of the squared relative error."""
    errors: dict = {}
    for name, gradient in gradients.items():
        error = (gradient - exact[name]).norm() / exact[name].norm()
        errors.setdefault(parameter_kind(name), []).append(error.item() ** 2)
    return {kind: mean(values) for kind, values in errors.items()}


def briefly_trained(training: Training, device: torch.device) -> dict:
    """The weights after a few steps."""
    model = make(CONTENDERS["ours"], training, device)
    optimizer = make_optimizer(model, training.learning_rate)
    for tokens in batches(replace(training, steps=min(TRAINED_STEPS, training.steps))):
        loss_of(model, tokens.to(device), training).backward()
        clip_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compare_gradients(training: Training, device: torch.device) -> list:
    """Each contender's error against float32 with eager attention: same weights, same batches."""
    weights = briefly_trained(training, device)
    in_float32 = replace(training, is_in_bf16=False)
    exact_model = make(CONTENDERS["torch"], in_float32, device)
    exact_model.set_attn_implementation("eager")
    exact_model.load_state_dict(weights)
    models = {name: make(CONTENDERS[name], training, device) for name in COMPARED}
    squares: dict = {name: [] for name in models}
    for tokens in batches(replace(training, steps=COMPARED_BATCHES)):
        exact = gradients_by_name(exact_model, tokens.to(device), in_float32)
        for name, model in models.items():
            model.load_state_dict(weights)
            with CONTENDERS[name].attention(device):
                gradients = gradients_by_name(model, tokens.to(device), training)
            squares[name].append(squared_errors(gradients, exact))
    figures = []
    for name, errors in squares.items():
        by_kind = {kind: mean([error[kind] for error in errors]) for kind in errors[0]}
        roots = {"all": mean(by_kind.values()), **by_kind}
        rounded = {kind: float(f"{math.sqrt(square):.4g}") for kind, square in roots.items()}
        figures.append({"gradient_error_of": name, **rounded})
    return figures


def run_figure(name: str, training: Training, outcome: Outcome, gpus: int) -> dict:
    """A flat dict of the run and what it gave."""
    settings = {key: value for key, value in vars(training).items() if key != "learning_rate"}
    return {
        "run": name,
        **settings,
        "gpus": gpus,
        "tokens_per_s": round(outcome.tokens_per_second),
        "peak_gb": round(outcome.peak_bytes / 1e9, 2),
        "first_loss": round(outcome.losses[0], 4),
        "last_loss": round(sum(outcome.losses[-10:]) / len(outcome.losses[-10:]), 4),
    }


def train_contender(name: str, training: Training, device: torch.device) -> tuple:
    contender = CONTENDERS[name]
    run = replace(training, kernels=contender.kernels)
    with contender.attention(device):
        outcome = train(run, device, prepare=contender.prepare)
    free_memory()
    return run_figure(name, run, outcome, gpus=1), outcome.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--curves", nargs="+", choices=CONTENDERS, default=CURVES)
    parser.add_argument("--steps", type=int, default=CHECK.steps)
    arguments = parser.parse_args()
    be_quiet()
    device = choose_device()
    started = time.perf_counter()
    check = TINY if arguments.tiny else replace(CHECK, steps=arguments.steps)
    kernel = get_kernel(REPO_ID, revision="v3", trust_remote_code=True)
    figures, losses = [], {}

    def report(*new: dict) -> None:
        figures.extend(new)
        for figure in new:
            print(f"{time.perf_counter() - started:5.1f} s", figure, flush=True)
        if not arguments.tiny:  # after each part, so that a later one may fail
            record = [*figures, *compare_curves(losses), *curve_figures(losses)]
            write_record("training_cuda", kernel, device, record)

    if "speed" in arguments.parts:
        sizes = ((1, 64), (2, 32)) if arguments.tiny else SIZES
        report(*measure_speed(TINY if arguments.tiny else SPEED, sizes, device))
        free_memory()
    if "gradients" in arguments.parts:
        report(*compare_gradients(check, device))
        free_memory()
    if "curves" in arguments.parts:
        for name in arguments.curves:
            figure, losses[name] = train_contender(name, check, device)
            report(figure)
    for figure in compare_curves(losses):
        print(figure, flush=True)


if __name__ == "__main__":
    main()
