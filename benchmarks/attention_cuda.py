"""The GPU part of benchmarks.attention: our kernels beside the backends of torch's own attention.

TFLOP/s count 4 B H Sq Sk D forward and 2.5 times that backward, half of it under a causal mask.
"""

import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 16384  # batch_size * seqlen
HIDDEN = 2048  # num_heads_q * head_dim
LAUNCHES = 4  # per burst: short enough that the card's power limit does not cut in
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def median(values: list) -> float:
    return sorted(values)[len(values) // 2]


def burst_seconds(function) -> float:
    """Seconds of one call, the mean of a burst of calls after a rest and a call that is not
    counted."""
    time.sleep(0.02)
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(LAUNCHES):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / LAUNCHES


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


def measure_cell(kernel, cell: dict, dtype: torch.dtype, turns: int) -> list:
    """One figure per pass; the candidates take turns."""
    tensors = random_inputs(cell, dtype)
    candidates = {"flash_attn_norm": (ours(kernel, cell, tensors), None)}
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend):
                candidates[name] = (torchs(cell, tensors), backend)
        except RuntimeError:
            print(f"{name}: not for {cell}", flush=True)
    tflop = 4e-12 * cell["batch_size"] * cell["num_heads_q"] * cell["seqlen"] ** 2
    tflop *= cell["head_dim"] * (0.5 if cell["causal"] else 1.0)
    figures = []
    for which, factor in (("forward", 1.0), ("backward", 2.5)):
        seconds = {name: [] for name in candidates}
        for _ in range(turns):
            for name, (passes, backend) in candidates.items():
                with sdpa_kernel(backend or SDPBackend.MATH):
                    seconds[name].append(burst_seconds(passes[which]))
        figure = {"pass": which, **cell}
        for name, (passes, backend) in candidates.items():
            figure[f"{name}_ms"] = round(median(seconds[name]) * 1e3, 4)
            figure[f"{name}_tflop_per_s"] = round(factor * tflop / median(seconds[name]), 1)
            with sdpa_kernel(backend or SDPBackend.MATH):
                figure[f"{name}_peak_mb"] = round(peak_bytes(passes[which]) / 1e6, 1)
        if "flash" in candidates:
            figure["over_flash"] = round(figure["flash_ms"] / figure["flash_attn_norm_ms"], 3)
        figures.append(figure)
        print_figure(figure)
    return figures


def print_figure(figure: dict) -> None:
    rates = "  ".join(
        f"{name} {figure[f'{name}_tflop_per_s']:6.1f}"
        for name in ("flash_attn_norm", *PEERS)
        if f"{name}_ms" in figure
    )
    print(
        f"d{figure['head_dim']:<4}{figure['num_heads_q']}:{figure['num_heads_kv']:<3}"
        f"S{figure['seqlen']:<6}{'causal' if figure['causal'] else 'full':7}"
        f"{figure['pass']:9}{rates}  over flash {figure.get('over_flash', 0):.2f}",
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
        ratios = [f["over_flash"] for f in figures if f["pass"] == which and "over_flash" in f]
        if ratios:
            mean = torch.tensor(ratios, dtype=torch.float64).log().mean().exp().item()
            means.append({"pass": which, "geometric_mean_over_flash": round(mean, 3)})
            means[-1]["least_over_flash"] = min(ratios)
            print(f"{which}: {mean:.3f} of flash, {min(ratios):.3f} at least", flush=True)
    return means


def measure_cuda(kernel, head_dims: list, seqlens: list, turns: int) -> list:
    figures = []
    for cell in cells(head_dims, seqlens):
        figures += measure_cell(kernel, cell, torch.bfloat16, turns)
    return figures + geometric_means(figures)
