"""Measures decoding from a key-value cache and writes benchmarks/results/decode.json.

    python -m benchmarks.decode

One figure per cell: batch_size sequences of seqlen_k keys each, one query row (or seqlen_q of
them). Bandwidth counts the bytes of K and V, once. Calls are replayed from CUDA graphs, as servers
do, over caches that together are larger than the L2; torch's own backends take turns with ours in
the same run, and so does the fastest read of memory that torch has, the roof.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from kernels import get_local_kernel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
GRAPH_BYTES = 320 << 20  # caches that the calls of a graph read in turn: several times the L2
GRAPH_SECONDS = 3e-3
ROOF_GUESS = 4.5e12  # bytes per second, to choose the number of calls only
REST_SECONDS = 0.01
TURNS = 3
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

# batch_size, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v, seqlen_q
DENSE = [(b, n, 32, 8, 128, 128, 1) for b in (1, 16, 64) for n in (512, 4096, 32768)]
OTHERS = [
    (16, 4096, 32, 32, 128, 128, 1),
    (16, 4096, 8, 1, 128, 128, 1),
    (16, 4096, 32, 8, 128, 128, 4),
    (16, 4096, 32, 8, 128, 128, 16),
    (64, 4096, 32, 8, 64, 64, 1),
    (16, 4096, 16, 4, 256, 256, 1),
    (16, 4096, 16, 1, 576, 512, 1),  # latent attention: values are the first columns of keys
    (16, 4096, 128, 1, 576, 512, 1),
]
PAGED = [(1, 32768), (16, 4096), (64, 4096)]
PAGE_SIZES = (16, 64, 256)
# With a float8 cache, page size beside it
FLOAT8 = [(cell, 0) for cell in DENSE] + [
    ((16, 4096, 32, 8, 128, 128, 1), 16),
    ((16, 4096, 32, 8, 128, 128, 1), 64),
    ((16, 4096, 32, 8, 128, 128, 4), 0),
    ((64, 4096, 32, 8, 64, 64, 1), 0),
    ((16, 4096, 16, 4, 256, 256, 1), 0),
]


class Timer:
    """Calls of one candidate in a CUDA graph, which reads their inputs again at each replay."""

    def __init__(self, calls: list, repeats: int):
        self.calls = calls  # keeps the inputs
        self.count = len(calls) * repeats
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls * repeats:
                call()
        self.seconds = []

    def measure(self) -> None:
        time.sleep(REST_SECONDS)
        self.graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        self.seconds.append(start.elapsed_time(end) / 2e3 / self.count)

    def median(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


def read_rate(memory: torch.Tensor) -> float:
    """Bytes per second of the fastest reduction of `memory`, which reads and writes nothing
    else."""
    matrix = memory[: memory.numel() // 8192 * 8192].view(-1, 8192)
    vector = torch.ones(8192, dtype=memory.dtype, device=memory.device)
    candidates = [lambda: matrix @ vector, matrix.amax, lambda: matrix.view(torch.float32).sum()]
    timers = [Timer([candidate], 2) for candidate in candidates]
    for _ in range(TURNS):
        for timer in timers:
            timer.measure()
    return matrix.numel() * 2 / min(timer.median() for timer in timers)


def caches(memory, cell: tuple, page_size: int) -> tuple[list, int]:
    """[(k_cache, v_cache)] that follow each other in `memory`, and the bytes of one pair."""
    batch_size, seqlen_k, _, num_heads_kv, head_dim, head_dim_v, _ = cell
    rows = page_size or seqlen_k
    entries = batch_size * seqlen_k // rows
    latent = head_dim > head_dim_v
    k_size = entries * rows * num_heads_kv * head_dim
    size = k_size if latent else k_size + entries * rows * num_heads_kv * head_dim_v
    pairs = []
    pair_bytes = size * memory.element_size()
    for i in range(max(1, min(32, GRAPH_BYTES // pair_bytes))):
        part = memory[i * size : (i + 1) * size]
        k = part[:k_size].view(entries, rows, num_heads_kv, head_dim)
        v = k[..., :head_dim_v] if latent else part[k_size:].view(*k.shape[:3], head_dim_v)
        pairs.append((k, v))
    return pairs, pair_bytes


def ours(kernel, q, pairs, cell, page_size) -> list:
    batch_size, seqlen_k, *_, seqlen_q = cell
    lengths = torch.full((batch_size,), seqlen_k, dtype=torch.int32, device="cuda")
    table = None
    if page_size:
        pages = torch.randperm(batch_size * seqlen_k // page_size, device="cuda")
        table = pages.to(torch.int32).view(batch_size, -1)
    return [
        lambda k=k, v=v: kernel.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, block_table=table, causal=seqlen_q > 1
        )
        for k, v in pairs
    ]


def torchs(q, pairs, cell, backend) -> list:
    """The same step; torch aligns causal masks top-left, so more query rows go without a mask."""
    gqa = cell[2] != cell[3]

    def call(k, v):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=gqa
            )

    return [lambda k=k, v=v: call(k, v) for k, v in pairs]


def measure_cell(kernel, memory, roof: float, cell: tuple, page_size: int = 0) -> dict:
    batch_size, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim_v, seqlen_q = cell
    q = torch.randn(
        batch_size, seqlen_q, num_heads_q, head_dim, dtype=torch.bfloat16, device="cuda"
    )
    is_float8 = memory.dtype == torch.float8_e4m3fn
    pairs, size = caches(memory, cell, page_size)
    once = len(pairs) * max(size / ROOF_GUESS, 5e-6)
    repeats = max(1, min(20 // len(pairs), int(GRAPH_SECONDS / once)))
    timers = {"flash_attn_norm": Timer(ours(kernel, q, pairs, cell, page_size), repeats)}
    if not page_size and not is_float8:
        for name, backend in PEERS.items():
            try:
                timers[name] = Timer(torchs(q, pairs, cell, backend), repeats)
            except RuntimeError:
                print(f"{name}: not for {cell}", flush=True)
    for _ in range(TURNS):
        for name in random.sample(list(timers), len(timers)):
            timers[name].measure()
    figure = {
        "batch_size": batch_size,
        "seqlen_k": seqlen_k,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "seqlen_q": seqlen_q,
        "page_size": page_size,
    }
    if is_float8:
        figure["cache_dtype"] = "float8_e4m3fn"
    for name, timer in timers.items():
        figure[f"{name}_us"] = round(timer.median() * 1e6, 2)
        figure[f"{name}_gb_per_s"] = round(size / timer.median() / 1e9)
        figure[f"{name}_share_of_roof"] = round(size / timer.median() / roof, 3)
    print(
        f"B{batch_size:<3} keys {seqlen_k:<6} {num_heads_q}/{num_heads_kv} d{head_dim} "
        f"q{seqlen_q:<3} page {page_size:<4} {'float8' if is_float8 else ''}"
        + "".join(
            f" {name} {figure[f'{name}_us']} us {figure[f'{name}_share_of_roof']}"
            for name in timers
        ),
        flush=True,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small caches only, no record")
    arguments = parser.parse_args()
    kernel = get_local_kernel(ROOT / "build")
    small = [cell for cell in DENSE if cell[0] * cell[1] <= 65536]
    dense = small if arguments.quick else DENSE
    largest = max(b * n * h * (d + dv) for b, n, _, h, d, dv, _ in dense)
    memory = torch.empty(max(largest, GRAPH_BYTES), dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 28):
        part.normal_()
    roof = read_rate(memory[: 1 << 30])
    print(f"reads alone: {roof / 1e9:.0f} GB/s", flush=True)
    figures = [{"read_gb_per_s": round(roof / 1e9)}]
    for cell in dense + ([] if arguments.quick else OTHERS):
        figures.append(measure_cell(kernel, memory, roof, cell))
    for batch_size, seqlen_k in [] if arguments.quick else PAGED:
        for page_size in PAGE_SIZES:
            cell = (batch_size, seqlen_k, 32, 8, 128, 128, 1)
            figures.append(measure_cell(kernel, memory, roof, cell, page_size))
    del memory
    memory = torch.empty(max(largest, GRAPH_BYTES), dtype=torch.float8_e4m3fn, device="cuda")
    for part in memory.split(1 << 28):
        part.copy_(torch.randn(part.shape, device="cuda"))
    for cell, page_size in FLOAT8:
        if not arguments.quick or cell in small:
            figures.append(measure_cell(kernel, memory, roof, cell, page_size))
    if not arguments.quick:
        print(write_record("decode", kernel, torch.device("cuda"), figures))


if __name__ == "__main__":
    main()
