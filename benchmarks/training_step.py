"""Trains a 1B-parameter model on one GPU with our attention and norms and with torch's own, from
the same weights on the same text, and compares the losses.

    PYTHONPATH=examples python -m benchmarks.training_step

writes benchmarks/results/training_cuda.json. torch runs twice, which says how far two runs part
that differ in nothing: its flash backward pass adds up in no fixed order. `--tiny` runs it in
miniature, on a CPU too, and writes nothing.
"""

import argparse
import contextlib
import math
from dataclasses import replace

from kernels import get_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_distributed import (
    REPO_ID,
    Outcome,
    Training,
    be_quiet,
    choose_device,
    free_memory,
    train,
)

from benchmarks.record import write_record

CHECK = Training("1b", steps=200, batch_size=1, seqlen=2048, is_checkpointed=False)
TINY = Training(steps=8, batch_size=2, seqlen=64, is_in_bf16=False)
# Name of the run: (kernels, torch's backend).
RUNS = {
    "ours": ("ours", None),
    "torch": ("torch", SDPBackend.FLASH_ATTENTION),
    "torch_again": ("torch", SDPBackend.FLASH_ATTENTION),
}
PAIRS = (("ours", "torch"), ("ours", "torch_again"), ("torch_again", "torch"))


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


def difference_figure(a: str, b: str, losses: dict) -> dict:
    """How far the losses of two runs lie apart, over the steps; the mean keeps its sign."""
    differences = [x - y for x, y in zip(losses[a], losses[b])]
    squares = [difference**2 for difference in differences]
    return {
        "difference": f"{a} - {b}",
        "largest": round(max(map(abs, differences)), 7),
        "root_mean_square": round(math.sqrt(sum(squares) / len(squares)), 7),
        "mean": round(sum(differences) / len(differences), 7),
        "at_step_1": round(differences[0], 7),
    }


def curve_figures(losses: dict) -> list:
    return [
        {"losses_of": name, "losses": [round(x, 7) for x in curve]}
        for name, curve in losses.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    be_quiet()
    device = choose_device()
    training = TINY if arguments.tiny else CHECK
    if arguments.steps:
        training = replace(training, steps=arguments.steps)
    kernel = get_kernel(REPO_ID, revision="v2", trust_remote_code=True)
    figures, losses = [], {}
    for name, (kernels, backend) in RUNS.items():
        on_gpu = device.type == "cuda" and backend is not None
        run = replace(training, kernels=kernels)
        with sdpa_kernel(backend) if on_gpu else contextlib.nullcontext():
            outcome = train(run, device)
        losses[name] = outcome.losses
        figures.append(run_figure(name, run, outcome, gpus=1))
        print(figures[-1], flush=True)
        free_memory()
        compared = [difference_figure(*pair, losses) for pair in PAIRS if {*pair} <= {*losses}]
        if not arguments.tiny:  # after each run, so that a later one may fail
            record = [*figures, *compared, *curve_figures(losses)]
            write_record("training_cuda", kernel, device, record)
    for figure in compared:
        print(figure, flush=True)


if __name__ == "__main__":
    main()
