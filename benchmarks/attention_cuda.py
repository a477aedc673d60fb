"""The GPU part of benchmarks.attention: our kernels beside the backends of torch's own attention,
and, where a card has kernels of its own (Hopper), beside our portable ones.

TFLOP/s count 4 B H Sq Sk D forward and 2.5 times that backward, half of it under a causal mask.
"""

import argparse
import contextlib
import os
import random
import time
from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.fa3_yardstick import fa3_tflop_per_s
from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16384  # batch_size * seqlen
HIDDEN = 2048  # num_heads_q * head_dim
LAUNCHES = 4  # per burst: short enough that the card's power limit does not cut in
REST = 0.02  # seconds before a burst
# After a burst of calls of more than so much work the card is at its power limit: 20 ms later the
# next one has been seen up to 6% slower, after 50 ms all lie within 1%.
LARGE_TFLOP = 1.0
REST_AFTER_LARGE_CALLS = 0.05
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def median(values: list) -> float:
    return sorted(values)[len(values) // 2]


def burst_seconds(function, rest: float = REST) -> float:
    """Seconds of one call on the device, the mean of a burst of calls after a rest and a call that
    is not counted. The device is kept waiting first, so that the host is ahead of it, and one more
    call before has torch's allocator keep all the memory, which it asks the driver for once."""
    function()
    time.sleep(rest)
    torch.cuda._sleep(8_000_000)
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(LAUNCHES):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / LAUNCHES


@contextlib.contextmanager
def portable_kernels():
    """Calls inside run the kernels that every card runs; the op reads the variable on each call."""
    os.environ["FLASH_ATTN_NORM_PORTABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["FLASH_ATTN_NORM_PORTABLE"]


def both_passes(function, inputs: list, dout: torch.Tensor) -> dict:
    """{pass: a function that runs it once}."""
    out = function(*inputs)

    def forward():
        with torch.no_grad():
            function(*inputs)

    def backward():
        torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def random_inputs(cell: dict, dtype: torch.dtype) -> list:
    """q, k, v and dout of normal random numbers, (batch_size, seqlen, heads, head_dim)."""
    return [
        torch.randn(
            cell["batch_size"],
            cell["seqlen"],
            cell[heads],
            cell["head_dim"],
            dtype=dtype,
            device="cuda",
        )
        for heads in ("num_heads_q", "num_heads_kv", "num_heads_kv", "num_heads_q")
    ]


def ours(kernel, cell: dict, tensors: list, **options) -> dict:
    inputs = [t.detach().requires_grad_() for t in tensors[:3]]
    return both_passes(
        lambda *x: kernel.flash_attn_func(*x, causal=cell["causal"], **options),
        inputs,
        tensors[3],
    )


def torchs(cell: dict, tensors: list) -> dict:
    """The same tensors seen as (batch_size, heads, seqlen, head_dim)."""
    q, k, v, dout = (t.transpose(1, 2).detach() for t in tensors)
    return both_passes(
        lambda *x: scaled_dot_product_attention(
            *x,
            is_causal=cell["causal"],
            enable_gqa=cell["num_heads_q"] != cell["num_heads_kv"],
        ),
        [t.requires_grad_() for t in (q, k, v)],
        dout,
    )


def peak_bytes(function) -> int:
    """Device memory that a call takes beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def candidates_of(kernel, cell: dict, tensors: list) -> dict:
    """{name: (its passes, the context they run in)}."""
    contexts = {"flash_attn_norm": contextlib.nullcontext}
    if torch.cuda.get_device_capability() == (9, 0):
        contexts["portable"] = portable_kernels
    candidates = {}
    for name, context in contexts.items():
        with context():
            candidates[name] = (ours(kernel, cell, tensors), context)
    for name, backend in PEERS.items():

        def context(backend=backend):
            return sdpa_kernel(backend)

        try:
            with context():
                candidates[name] = (torchs(cell, tensors), context)
        except RuntimeError:
            print(f"{name}: not for {cell}", flush=True)
    return candidates


def measure_cell(kernel, cell: dict, dtype: torch.dtype, turns: int) -> list:
    """One figure per pass; the candidates take turns in random order, so that none always follows
    the one that draws the most power, the portable kernels one only."""
    tensors = random_inputs(cell, dtype)
    candidates = candidates_of(kernel, cell, tensors)
    tflop = 4e-12 * cell["batch_size"] * cell["num_heads_q"] * cell["seqlen"] ** 2
    tflop *= cell["head_dim"] * (0.5 if cell["causal"] else 1.0)
    figures = []
    for which, factor in (("forward", 1.0), ("backward", 2.5)):
        seconds = {name: [] for name in candidates}
        rest = REST if factor * tflop < LARGE_TFLOP else REST_AFTER_LARGE_CALLS
        for turn in range(turns):
            for name in random.sample(list(candidates), len(candidates)):
                if name == "portable" and turn > 0:
                    continue
                passes, context = candidates[name]
                with context():
                    seconds[name].append(burst_seconds(passes[which], rest))
        figure = {"pass": which, **cell}
        for name, (passes, context) in candidates.items():
            figure[f"{name}_ms"] = round(median(seconds[name]) * 1e3, 4)
            figure[f"{name}_tflop_per_s"] = round(factor * tflop / median(seconds[name]), 1)
            with context():
                figure[f"{name}_peak_mb"] = round(peak_bytes(passes[which]) / 1e6, 1)
        add_ratios(figure)
        figures.append(figure)
        print_figure(figure)
    return figures


def add_ratios(figure: dict) -> None:
    """Our speed over each peer's; FlashAttention-3's is quoted from another run on an H200."""
    ours_ms = figure["flash_attn_norm_ms"]
    for name in ("portable", *PEERS):
        if f"{name}_ms" in figure:
            figure[f"over_{name}"] = round(figure[f"{name}_ms"] / ours_ms, 3)
    quoted = fa3_tflop_per_s(figure, figure["pass"])
    if quoted is not None and "H200" in torch.cuda.get_device_name():
        figure["fa3_quoted_tflop_per_s"] = quoted
        figure["over_fa3_quoted"] = round(figure["flash_attn_norm_tflop_per_s"] / quoted, 3)


def print_figure(figure: dict) -> None:
    rates = "  ".join(
        f"{name} {figure[f'{name}_tflop_per_s']:6.1f}"
        for name in ("flash_attn_norm", "portable", *PEERS)
        if f"{name}_ms" in figure
    )
    ratios = "  ".join(
        f"{name[5:]} {figure[name]:.2f}" for name in sorted(figure) if name.startswith("over_")
    )
    print(
        f"d{figure['head_dim']:<4}{figure['num_heads_q']}:{figure['num_heads_kv']:<3}"
        f"S{figure['seqlen']:<6}{'causal' if figure['causal'] else 'full':7}"
        f"{figure['pass']:9}{rates}  over {ratios}",
        flush=True,
    )


def cells(head_dims: list, seqlens: list) -> list:
    """Equal work in every cell of a head dim, as FlashAttention's papers have it; GQA at 128."""
    heads = [(d, HIDDEN // d, HIDDEN // d) for d in head_dims]
    if 128 in head_dims:
        heads.append((128, 32, 8))
    return [
        {
            "batch_size": TOKENS // seqlen,
            "seqlen": seqlen,
            "num_heads_q": num_heads_q,
            "num_heads_kv": num_heads_kv,
            "head_dim": head_dim,
            "causal": causal,
        }
        for head_dim, num_heads_q, num_heads_kv in heads
        for causal in (False, True)
        for seqlen in seqlens
    ]


def geometric_means(figures: list) -> list:
    means = []
    for which in ("forward", "backward"):
        for peer in ("over_flash", "over_cudnn", "over_fa3_quoted", "over_portable"):
            ratios = [f[peer] for f in figures if f["pass"] == which and peer in f]
            if not ratios:
                continue
            mean = torch.tensor(ratios, dtype=torch.float64).log().mean().exp().item()
            means.append({"pass": which, f"geometric_mean_{peer}": round(mean, 3)})
            means[-1][f"least_{peer}"] = min(ratios)
            print(f"{which} {peer}: {mean:.3f} in the mean, {min(ratios):.3f} at least", flush=True)
    return means


def measure_cuda(kernel, head_dims: list, seqlens: list, turns: int) -> list:
    figures = []
    for cell in cells(head_dims, seqlens):
        figures += measure_cell(kernel, cell, torch.bfloat16, turns)
    return figures + geometric_means(figures)


def measure_and_record(description: str, name: str, measure) -> None:
    """A benchmark's own command; `measure(kernel, turns)` gives the record's figures."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernel = get_local_kernel(args.build)
    figures = measure(kernel, args.turns)
    if not args.no_record:
        print(write_record(name, kernel, torch.device("cuda"), figures))
