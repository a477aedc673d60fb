"""Run by torchrun in each process: ring attention on this process's rows, results to a file.

    PYTHONPATH=tests torchrun --nproc-per-node 2 context_parallel_worker.py FOLDER cpu|cuda

Each process writes FOLDER/<case>-<rank>.pt: a result for each of ``comparison.run_formula``, of its
own rows.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from attention.comparison import DIFFERENTIABLE, make_packed, random_dlse, random_dout
from kernels import get_kernel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "context_parallel.py"


def load_example():
    """examples/context_parallel.py as a module."""
    specification = importlib.util.spec_from_file_location("context_parallel", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # dataclasses look it up
    specification.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of queries, of keys and values
    head_dims: tuple[int, int] = (16, 16)  # of queries and keys, of values
    causal: bool = True
    has_sink: bool = False
    has_dlse: bool = False
    dtype: torch.dtype = torch.float32

    def inputs(self, device: torch.device) -> dict:
        """Whole sequences, the same on every process and device."""
        torch.manual_seed(0)
        place = {"device": torch.device("cpu"), "dtype": self.dtype}
        inputs = make_packed(place, self.lengths, None, self.heads, *self.head_dims)
        if self.has_sink:
            inputs["s_aux"] = torch.randn(self.heads[0])
        inputs["dout"] = random_dout(inputs)
        if self.has_dlse:
            inputs["dsoftmax_lse"] = random_dlse(inputs)
        return {name: tensor.to(device) for name, tensor in inputs.items()}


BF16 = {"dtype": torch.bfloat16}
CASES = {
    "one_sequence": Case((257,), (4, 2)),
    "batch": Case((64, 64, 64), (6, 2), (32, 32)),
    "packed": Case((100, 1, 0, 3, 150, 7), (14, 2)),
    "mqa_value_head_dim": Case((33, 90), (8, 1), (24, 16)),
    "full": Case((70, 5), (4, 2), causal=False),
    "sink": Case((60, 2), (8, 2), has_sink=True),
    "lse_gradient": Case((60, 21), (4, 2), has_dlse=True, has_sink=True),
    "bfloat16": Case((300, 41), (8, 2), (64, 64), **BF16),
    "bfloat16_full": Case((150,), (6, 2), (64, 64), causal=False, **BF16),
}
LONG = Case((1500, 500), (8, 2), (128, 128), **BF16)


def cases(device: str) -> dict[str, Case]:
    """By name. A GPU takes no float32, and long sequences in no time."""
    if device == "cpu":
        return CASES
    in_bf16 = {name: Case(**{**vars(case), **BF16}) for name, case in CASES.items()}
    return {**in_bf16, "long": LONG}


def run_case(example, attention, case: Case, device: torch.device) -> dict:
    """Results and gradients of this process's rows."""
    inputs = case.inputs(device)
    ring = example.Ring(case.lengths, case.causal, device)
    rows = ring.zigzag.rows(ring.rank).to(device)
    leaves = {name: inputs[name][rows].requires_grad_() for name in ("q", "k", "v")}
    if case.has_sink:
        leaves["s_aux"] = inputs["s_aux"].requires_grad_()
    out, softmax_lse = example.ring_attention(attention, ring, **leaves)
    outputs, weights = [out], [inputs["dout"][rows]]
    if case.has_dlse:
        outputs.append(softmax_lse)
        weights.append(inputs["dsoftmax_lse"][:, rows])
    names = [name for name in DIFFERENTIABLE if name in leaves]
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in names], weights)
    results = {"out": out, "softmax_lse": softmax_lse}
    results |= {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


def backward_order(example, attention, device: torch.device) -> list[str]:
    """Events of a backward pass in order: "send" and "wait" of a shift, "attention <step>"."""
    events = []
    steps = iter(range(dist.get_world_size()))

    def watched(q, *arguments, **options):
        step = next(steps)
        q = q.view_as(q)
        q.register_hook(lambda _: events.append(f"attention {step}"))
        return attention(q, *arguments, **options)

    class WatchedShift(example.Shift):
        def start(self, *arguments, **options):
            events.append("send")
            return super().start(*arguments, **options)

        def finish(self):
            events.append("wait")
            return super().finish()

    example.Shift = WatchedShift
    case = CASES["one_sequence"]
    ring = example.Ring(case.lengths, case.causal, device)
    inputs = Case(**{**vars(case), **BF16}).inputs(device)
    rows = ring.zigzag.rows(ring.rank).to(device)
    leaves = [inputs[name][rows].requires_grad_() for name in ("q", "k", "v")]
    out, _ = example.ring_attention(watched, ring, *leaves)
    events.clear()
    out.sum().backward()
    return events


def main(folder: Path, device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        device_id=None if device.type == "cpu" else device,
    )
    example = load_example()
    kernel = get_kernel(example.REPO_ID, revision=os.environ.get("KERNEL_REVISION", "v1"))
    for name, case in cases(device.type).items():
        results = run_case(example, kernel.flash_attn_varlen_func, case, device)
        torch.save(results, folder / f"{name}-{dist.get_rank()}.pt")
    order = backward_order(example, kernel.flash_attn_varlen_func, device)
    torch.save(order, folder / f"order-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]))
