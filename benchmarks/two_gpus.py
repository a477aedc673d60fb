"""Two GPUs of one host: a 1B-parameter model under each sharding, and ring attention.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m benchmarks.two_gpus

writes benchmarks/results/two_gpus.json, anew after each part. `--tiny` runs all of it in miniature,
over gloo on a CPU too, and writes nothing.
"""

import argparse
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from kernels import get_kernel
from train_distributed import (
    REPO_ID,
    Training,
    be_quiet,
    choose_device,
    free_memory,
    start_processes,
    train,
)

from benchmarks.curves import curve_figures, difference_figure
from benchmarks.record import write_record
from benchmarks.ring import measure_ring, timeline
from benchmarks.training_step import run_figure

TRAINING = Training("1b", steps=50, batch_size=2, seqlen=3072)
TINY = Training(steps=6, batch_size=2, seqlen=64, is_in_bf16=False)
CELL = {"num_heads_q": 32, "num_heads_kv": 8, "head_dim": 128, "causal": True}
TINY_CELL = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 32, "causal": True}


class Report:
    """Figures of all parts; the first process prints and writes them."""

    def __init__(self, kernel, device: torch.device, writes: bool):
        self.kernel, self.device, self.writes = kernel, device, writes
        self.figures: list = []
        self.losses: dict = {}

    def add(self, *figures: dict) -> None:
        self.figures += figures
        if dist.get_rank() > 0:
            return
        for figure in figures:
            print(figure, flush=True)
        if self.writes:
            write_record("two_gpus", self.kernel, self.device, self.finished())

    def finished(self) -> list:
        """The figures with the loss curves, and how far each lies from one GPU's."""
        references = {"ours_again": "ours", "torch": "ours", "torch_again": "torch"}
        pairs = [
            (name, references.get(name, "ours")) for name in self.losses if name not in ("ours",)
        ]
        known = [pair for pair in pairs if pair[1] in self.losses]
        differences = [difference_figure(*pair, self.losses) for pair in known]
        return self.figures + differences + curve_figures(self.losses)


def train_side_by_side(report: Report, training: Training, runs: list) -> None:
    """A run on each GPU by itself, at the same time. ``runs``: (name, kernels) of each process."""
    name, kernels = runs[dist.get_rank()]
    run = replace(training, kernels=kernels)
    outcome = train(run, report.device)
    free_memory()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (run_figure(name, run, outcome, gpus=1), outcome.losses))
    for (name, _), (figure, losses) in zip(runs, gathered):
        report.losses[name] = losses
        report.add(figure)


def train_sharded(report: Report, training: Training, sharding: str) -> None:
    run = replace(training, sharding=sharding)
    outcome = train(run, report.device)
    free_memory()
    report.losses[sharding] = outcome.losses
    report.add(run_figure(sharding, run, outcome, gpus=dist.get_world_size()))


def measure_rings(report: Report, is_tiny: bool) -> None:
    cell = TINY_CELL if is_tiny else CELL
    unit = 64 if is_tiny else 8192
    packed = [unit, unit // 2, 2 * unit, unit // 2 - 3, 3]
    for lengths, turns in (([unit], 3), ([4 * unit], 2), (packed, 3), ([8 * unit], 1)):
        report.add(*measure_ring(report.kernel, cell, lengths, report.device, turns))
        free_memory()
    report.add(*timeline(report.kernel, cell, [4 * unit], report.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["ring", "training"])
    arguments = parser.parse_args()
    be_quiet()
    device = choose_device()
    start_processes(device)
    kernel = get_kernel(REPO_ID, revision="v3", trust_remote_code=True)
    writes = not arguments.tiny and int(os.environ["RANK"]) == 0
    report = Report(kernel, device, writes)
    if "ring" in arguments.parts:
        measure_rings(report, arguments.tiny)
    if "training" in arguments.parts:
        training = TINY if arguments.tiny else TRAINING
        train_side_by_side(report, training, [("ours", "ours"), ("torch", "torch")])
        for sharding in ("ddp", "fsdp2", "tp"):
            train_sharded(report, training, sharding)
        train_side_by_side(report, training, [("ours_again", "ours"), ("torch_again", "torch")])
    if dist.get_rank() == 0:
        for figure in report.finished():
            if "difference" in figure:
                print(figure, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
