"""Attention against torch's own, forward and backward, in the same run.

    python -m benchmarks.attention --device cpu      on the same threads
    python -m benchmarks.attention --device cuda     bfloat16, every backend; short queries

Prints a table and writes benchmarks/results/attention_<device>.json. The candidates take turns, so
that whatever else the machine does hits all of them. On the CPU `ratio` is our time over torch's,
of the fastest turn of each and of the median turn; on a GPU, our speed over the flash backend's.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_cuda import measure_cuda
from benchmarks.attention_short import measure_short_queries
from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def median(values: list) -> float:
    return sorted(values)[len(values) // 2]


def take_turns(candidates: dict, min_turns: int, seconds: float) -> dict:
    """Seconds of each phase of each candidate: {name: [[forward, backward], ...]}.

    A candidate is a function that runs both passes once and returns their times.
    """
    times = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    started = time.perf_counter()
    while len(next(iter(times.values()))) < min_turns or time.perf_counter() - started < seconds:
        for name, candidate in candidates.items():
            times[name].append(candidate())
    return times


def cpu_pass(function, inputs: list, dout: torch.Tensor) -> list:
    """[forward seconds, backward seconds] of one call."""
    started = time.perf_counter()
    out = function(*inputs)
    between = time.perf_counter()
    torch.autograd.grad(out, inputs, dout)
    return [between - started, time.perf_counter() - between]


def cpu_candidates(kernel, dtype: torch.dtype, head_dim: int, seqlen: int, args) -> dict:
    """Both get the same values, each in its own layout, as a model would hand them over."""

    def random(num_heads: int) -> torch.Tensor:
        return torch.randn(args.batch_size, seqlen, num_heads, head_dim).to(dtype)

    heads, kv_heads = args.num_heads_q, args.num_heads_kv
    q, k, v, dout = random(heads), random(kv_heads), random(kv_heads), random(heads)
    ours = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    torchs = [tensor.transpose(1, 2).contiguous().requires_grad_() for tensor in (q, k, v)]
    torchs_dout = dout.transpose(1, 2).contiguous()

    def flash_attn_norm():
        return cpu_pass(lambda *x: kernel.flash_attn_func(*x, causal=True), ours, dout)

    def torch_sdpa():
        return cpu_pass(
            lambda *x: scaled_dot_product_attention(
                *x, is_causal=True, enable_gqa=heads != kv_heads
            ),
            torchs,
            torchs_dout,
        )

    return {"flash_attn_norm": flash_attn_norm, "torch_sdpa": torch_sdpa}


def measure_cpu(kernel, args) -> list:
    """One figure for each dtype, head dim, length and pass."""
    figures = []
    for dtype, head_dim, seqlen in itertools.product(args.dtypes, args.head_dims, args.seqlens):
        candidates = cpu_candidates(kernel, DTYPES[dtype], head_dim, seqlen, args)
        times = take_turns(candidates, args.turns, args.seconds)
        # Two products forward, five backward, half of each under the causal mask.
        gflop = 2 * args.batch_size * args.num_heads_q * seqlen**2 * head_dim / 1e9
        for index, (name, products) in enumerate((("forward", 1.0), ("backward", 2.5))):
            mine = [turn[index] for turn in times["flash_attn_norm"]]
            peer = [turn[index] for turn in times["torch_sdpa"]]
            figures.append(
                {
                    "pass": name,
                    "dtype": dtype,
                    "head_dim": head_dim,
                    "seqlen": seqlen,
                    "batch_size": args.batch_size,
                    "num_heads_q": args.num_heads_q,
                    "num_heads_kv": args.num_heads_kv,
                    "turns": len(mine),
                    "min_ms": round(min(mine) * 1e3, 3),
                    "median_ms": round(median(mine) * 1e3, 3),
                    "sdpa_min_ms": round(min(peer) * 1e3, 3),
                    "sdpa_median_ms": round(median(peer) * 1e3, 3),
                    "ratio_of_mins": round(min(mine) / min(peer), 3),
                    "ratio_of_medians": round(median(mine) / median(peer), 3),
                    "gflop_per_s": round(products * gflop / min(mine), 1),
                }
            )
            print_figure(figures[-1])
    return figures


def print_figure(figure: dict) -> None:
    print(
        f"{figure['dtype']:9} d{figure['head_dim']:<4} S{figure['seqlen']:<6}{figure['pass']:9}"
        f"{figure['min_ms']:10.2f} ms  sdpa {figure['sdpa_min_ms']:10.2f} ms  "
        f"ratio {figure['ratio_of_mins']:.2f} (medians {figure['ratio_of_medians']:.2f})  "
        f"{figure['gflop_per_s']:7.0f} GFLOP/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of variants")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--head-dims", nargs="+", type=int, help="default 64 128; GPU 256 too")
    parser.add_argument("--seqlens", nargs="+", type=int, help="default 512 to 4096, GPU to 16384")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-heads-q", type=int, default=8)
    parser.add_argument("--num-heads-kv", type=int, default=8)
    parser.add_argument("--turns", type=int, help="at least, of each candidate; 5, on a GPU 3")
    parser.add_argument("--seconds", type=float, default=3.0, help="at least, per setting")
    parser.add_argument("--no-record", action="store_true", help="print only")
    args = parser.parse_args()

    torch.manual_seed(0)
    kernel = get_local_kernel(args.build)
    on_gpu = args.device == "cuda"
    args.head_dims = args.head_dims or ([64, 128, 256] if on_gpu else [64, 128])
    args.turns = args.turns or (3 if on_gpu else 5)
    args.seqlens = args.seqlens or [2**n for n in range(9, 15 if on_gpu else 13)]
    if on_gpu:
        figures = measure_cuda(kernel, args.head_dims, args.seqlens, args.turns)
        figures += measure_short_queries(kernel, args.turns)
    else:
        figures = measure_cpu(kernel, args)
    if not args.no_record:
        device = torch.device(args.device)
        print(write_record(f"attention_{args.device}", kernel, device, figures))


if __name__ == "__main__":
    main()
