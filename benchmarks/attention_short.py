"""Few query rows against many keys in ordinary tensors, as a step of generation without a cache of
ours hands them over: flash_attn_func beside torch's backends, by the method of benchmarks.decode.

Calls are replayed from CUDA graphs over keys and values that together are larger than the L2.
"""

import random

import torch

from benchmarks.decode import GRAPH_BYTES, GRAPH_SECONDS, PEERS, ROOF_GUESS, Timer, caches, torchs

BATCH_SIZES = (1, 32)
SEQLENS_K = (512, 4096, 32768)
SEQLENS_Q = (1, 4, 16)
HEADS = (32, 8, 128)  # num_heads_q, num_heads_kv, head_dim


def ours(kernel, q, pairs) -> list:
    """Causal, as models ask for it; torch aligns such a mask top-left, so its calls go without."""
    causal = q.shape[1] > 1
    return [lambda k=k, v=v: kernel.flash_attn_func(q, k, v, causal=causal) for k, v in pairs]


def measure_call(kernel, memory, batch_size: int, seqlen_k: int, seqlen_q: int, turns: int) -> dict:
    num_heads_q, num_heads_kv, head_dim = HEADS
    cell = (batch_size, seqlen_k, num_heads_q, num_heads_kv, head_dim, head_dim, seqlen_q)
    q = torch.randn(batch_size, seqlen_q, num_heads_q, head_dim, dtype=memory.dtype, device="cuda")
    pairs, size = caches(memory, cell, page_size=0)
    once = len(pairs) * max(size / ROOF_GUESS, 5e-6)
    repeats = max(1, min(20 // len(pairs), int(GRAPH_SECONDS / once)))
    timers = {"flash_attn_norm": Timer(ours(kernel, q, pairs), repeats)}
    for name, backend in PEERS.items():
        timers[name] = Timer(torchs(q, pairs, cell, backend), repeats)
    for _ in range(turns):
        for name in random.sample(list(timers), len(timers)):
            timers[name].measure()
    figure = {
        "pass": "forward",
        "short_queries": True,
        "batch_size": batch_size,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "head_dim": head_dim,
    }
    for name, timer in timers.items():
        figure[f"{name}_us"] = round(timer.median() * 1e6, 2)
        figure[f"{name}_gb_per_s"] = round(size / timer.median() / 1e9)
    for name in PEERS:
        ratio = timers[name].median() / timers["flash_attn_norm"].median()
        figure[f"faster_than_{name}"] = round(ratio, 3)
    print(
        f"B{batch_size:<3} q{seqlen_q:<3} keys {seqlen_k:<6} {num_heads_q}:{num_heads_kv}"
        + "".join(f"  {name} {figure[f'{name}_us']} us" for name in timers)
        + "".join(f"  over {name} {figure[f'faster_than_{name}']:.2f}" for name in PEERS),
        flush=True,
    )
    return figure


def measure_short_queries(kernel, turns: int) -> list:
    _, num_heads_kv, head_dim = HEADS
    largest = 2 * max(BATCH_SIZES) * max(SEQLENS_K) * num_heads_kv * head_dim
    memory = torch.empty(max(largest, GRAPH_BYTES), dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 28):
        part.normal_()
    with torch.no_grad():
        return [
            measure_call(kernel, memory, batch_size, seqlen_k, seqlen_q, turns)
            for batch_size in BATCH_SIZES
            for seqlen_k in SEQLENS_K
            for seqlen_q in SEQLENS_Q
        ]
