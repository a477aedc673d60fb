"""What each feature of attention costs on a GPU, and head dim 512 beside torch's math backend.

    python -m benchmarks.attention_features

writes attention_features_cuda.json (--no-record: not). Bursts after a rest, medians, one process.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_cuda import (
    both_passes,
    burst_seconds,
    measure_and_record,
    median,
    random_inputs,
    torchs,
)


def feature_options(cell: dict) -> dict:
    """{feature: a function that makes its keyword arguments}."""
    batch_size, heads, seqlen = cell["batch_size"], cell["num_heads_q"], cell["seqlen"]

    def bias(*shape, dtype=torch.bfloat16, gradient=False):
        tensor = torch.randn(*shape, seqlen, dtype=dtype, device="cuda")
        return {"attn_bias": tensor.requires_grad_(gradient)}

    return {
        "none": lambda: {},
        "deterministic": lambda: {"deterministic": True},
        "s_aux": lambda: {"s_aux": torch.randn(heads, device="cuda")},
        "window 1024": lambda: {"window_size": (1024, 0)},
        "softcap": lambda: {"softcap": 30.0},
        "alibi": lambda: {"alibi_slopes": torch.rand(heads, device="cuda")},
        "dropout": lambda: {"dropout_p": 0.1},
        "attn_bias, per head": lambda: bias(1, heads, seqlen),
        "attn_bias, per head, float32": lambda: bias(1, heads, seqlen, dtype=torch.float32),
        "attn_bias, per row": lambda: bias(1, 1, seqlen),
        "attn_bias, per key": lambda: bias(batch_size, 1, 1),
        "attn_bias, per head, gradient": lambda: bias(1, heads, seqlen, gradient=True),
        "attn_bias, full, gradient": lambda: bias(batch_size, heads, seqlen, gradient=True),
    }


def passes_of(kernel, cell: dict, tensors: list, options: dict) -> dict:
    """{pass: a function that runs it once}, the gradient of a bias that wants one included."""
    q, k, v, dout = tensors
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    bias = [t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    return both_passes(
        lambda *x: kernel.flash_attn_func(*x[:3], causal=cell["causal"], **options),
        inputs + bias,
        dout,
    )


def measure_features(kernel, turns: int) -> list:
    """One figure per feature and pass at head dim 128; at 256, which has kernels of its own, of
    deterministic gradients alone."""
    figures = []
    for heads, head_dim in ((16, 128), (8, 256)):
        cell = {"batch_size": 4, "seqlen": 4096, "num_heads_q": heads, "num_heads_kv": heads}
        cell.update({"head_dim": head_dim, "causal": True})
        tensors = random_inputs(cell, torch.bfloat16)
        for feature, options in feature_options(cell).items():
            if head_dim != 128 and feature not in ("none", "deterministic"):
                continue
            passes = passes_of(kernel, cell, tensors, options())
            for which, run in passes.items():
                seconds = median([burst_seconds(run) for _ in range(turns)])
                figures.append({"pass": which, "feature": feature, **cell})
                figures[-1]["flash_attn_norm_ms"] = round(seconds * 1e3, 4)
                print(f"d{head_dim} {feature:30} {which:9}{seconds * 1e3:8.3f} ms", flush=True)
            del passes
    return figures


def measure_largest_head_dim(kernel, turns: int) -> list:
    """Head dim 512, which no other fused kernel of torch takes, beside the math backend."""
    figures = []
    for seqlen, causal in ((1024, True), (4096, True), (4096, False)):
        cell = {"batch_size": 8192 // seqlen, "seqlen": seqlen, "num_heads_q": 4}
        cell.update({"num_heads_kv": 4, "head_dim": 512, "causal": causal})
        tensors = random_inputs(cell, torch.bfloat16)
        with sdpa_kernel(SDPBackend.MATH):
            candidates = {
                "flash_attn_norm": passes_of(kernel, cell, tensors, {}),
                "math": torchs(cell, tensors),
            }
            for which in ("forward", "backward"):
                seconds = {name: [] for name in candidates}
                for _ in range(turns):
                    for name, passes in candidates.items():
                        seconds[name].append(burst_seconds(passes[which]))
                figure = {"pass": which, **cell}
                for name, values in seconds.items():
                    figure[f"{name}_ms"] = round(median(values) * 1e3, 4)
                figure["over_math"] = round(figure["math_ms"] / figure["flash_attn_norm_ms"], 2)
                figures.append(figure)
                print(
                    f"d512 S{seqlen:<6}{'causal' if causal else 'full':7}{which:9}"
                    f"{figure['flash_attn_norm_ms']:8.3f} ms  math {figure['math_ms']:8.3f} ms  "
                    f"x{figure['over_math']}",
                    flush=True,
                )
    return figures


def measure(kernel, turns: int) -> list:
    return measure_features(kernel, turns) + measure_largest_head_dim(kernel, turns)


if __name__ == "__main__":
    measure_and_record(__doc__, "attention_features_cuda", measure)
