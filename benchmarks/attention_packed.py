"""Packed sequences on a GPU: the forward pass beside our portable kernels and, where all sequences
are of one length, beside the same ones as a dense batch.

    python -m benchmarks.attention_packed

writes attention_packed_cuda.json (--no-record: not). Bursts after a rest, medians, random order,
one process (benchmarks.attention_cuda).
"""

import random

import torch

from benchmarks.attention_cuda import (
    burst_seconds,
    measure_and_record,
    median,
    portable_kernels,
)

TOKENS = 16384
HEADS = [(16, 16, 128), (16, 4, 128), (16, 16, 64), (8, 8, 256)]  # of q, of k and v, head dim


def random_lengths(longest: int) -> list:
    generator = random.Random(longest)
    lengths = []
    while sum(lengths) < TOKENS:
        lengths.append(generator.randint(1, longest))
    return lengths


def batches() -> dict:
    """{name: lengths}: equal ones, random ones, and a few long ones among many short ones."""
    equal = {f"{rows} rows": [rows] * (TOKENS // rows) for rows in (32, 64, 96, 128, 256, 1024)}
    mixed = {f"1 to {longest}": random_lengths(longest) for longest in (64, 128, 256)}
    few_long = {
        "1 of 8192, 256 of 32": [8192] + [32] * 256,
        "1 of 4096, 400 of 30": [4096] + [30] * 400,
        "4 of 50": [50] * 4,
    }
    return {**equal, **mixed, **few_long}


def candidates_of(kernel, lengths: list, heads: tuple, device: str) -> dict:
    """{name: a function that runs the forward pass once}."""
    num_heads_q, num_heads_kv, head_dim = heads

    def tensor(num_heads):
        shape = sum(lengths), num_heads, head_dim
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    q, k, v = tensor(num_heads_q), tensor(num_heads_kv), tensor(num_heads_kv)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = ends.to(torch.int32).to(device)

    def packed():
        longest = max(lengths)
        return kernel.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )

    def portable():
        with portable_kernels():
            return packed()

    candidates = {"flash_attn_norm": packed, "portable": portable}
    if len(set(lengths)) == 1:
        batch = [x.view(len(lengths), lengths[0], *x.shape[1:]) for x in (q, k, v)]
        candidates["dense"] = lambda: kernel.flash_attn_func(*batch, causal=True)
    return candidates


@torch.no_grad()
def measure_packed(kernel, turns: int, device: str = "cuda") -> list:
    figures = []
    for heads in HEADS:
        for name, lengths in batches().items():
            candidates = candidates_of(kernel, lengths, heads, device)
            seconds = {candidate: [] for candidate in candidates}
            for _ in range(turns):
                for candidate in random.sample(list(candidates), len(candidates)):
                    seconds[candidate].append(burst_seconds(candidates[candidate]))
            figure = {"pass": "forward", "causal": True, "lengths": name}
            figure.update(zip(("num_heads_q", "num_heads_kv", "head_dim"), heads))
            for candidate, values in seconds.items():
                figure[f"{candidate}_us"] = round(median(values) * 1e6, 1)
            figures.append(figure)
            print(
                f"d{heads[2]:<4}{heads[0]}:{heads[1]:<3}{name:22}"
                + "".join(f"  {each} {figure[f'{each}_us']:7.1f} us" for each in candidates),
                flush=True,
            )
    return figures


if __name__ == "__main__":
    measure_and_record(__doc__, "attention_packed_cuda", measure_packed)
