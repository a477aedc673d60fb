"""The calls that test_two_gpus.py makes, and what it runs in a process of its own.

    PYTHONPATH=tests python two_gpus_worker.py

Uses each head dim's kernels for the first time in a process on one GPU, then on the other, the
second GPU first for every other head dim; prints a head dim when the results are the same.
"""

import os

import torch
from attention.comparison import cumulative
from kernels import get_kernel

HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)
LENGTHS = (130, 0, 70)
TOTAL = sum(LENGTHS)
ATTENTION = {"causal": True, "deterministic": True}


def dense(head_dim: int = 64) -> dict:
    return {
        "q": (2, 130, 4, head_dim),
        "k": (2, 130, 2, head_dim),
        "v": (2, 130, 2, head_dim),
        "dout": (2, 130, 4, head_dim),
    }


QKV = {"qkv": (2, 130, 3, 4, 64), "dout": (2, 130, 4, 64)}
KV = {"q": (2, 130, 4, 64), "kv": (2, 130, 2, 2, 64), "dout": (2, 130, 4, 64)}
VARLEN = {name: (TOTAL, *shape[2:]) for name, shape in dense().items()}
VARLEN_QKV = {"qkv": (TOTAL, 3, 4, 64), "dout": (TOTAL, 4, 64)}
VARLEN_KV = {"q": (TOTAL, 4, 64), "kv": (TOTAL, 2, 2, 64), "dout": (TOTAL, 4, 64)}
NORM = {"x": (300, 1000), "residual": (300, 1000), "weight": (1000,), "dout": (300, 1000)}
EXTRAS = {"alibi_slopes": (4,), "s_aux": (4,), "attn_bias": (1, 4, 1, 130)}
FLOAT32 = ("alibi_slopes", "s_aux")
KVCACHE = {
    "q": (2, 1, 8, 128),
    "k_cache": (2, 600, 2, 128),
    "v_cache": (2, 600, 2, 128),
    "k": (2, 1, 2, 128),
    "v": (2, 1, 2, 128),
}
CACHE_SEQLENS = (570, 3)

# name of the call: (function, shapes of its tensors, names of its index tensors, other arguments)
CALLS = {
    "flash_attn_func": ("flash_attn_func", dense(), (), ATTENTION),
    "flash_attn_func_with_extras": (
        "flash_attn_func",
        {**dense(), **EXTRAS},
        (),
        {**ATTENTION, "softcap": 20.0},
    ),
    "flash_attn_qkvpacked_func": ("flash_attn_qkvpacked_func", QKV, (), ATTENTION),
    "flash_attn_kvpacked_func": ("flash_attn_kvpacked_func", KV, (), ATTENTION),
    "flash_attn_varlen_func": ("flash_attn_varlen_func", VARLEN, ("_q", "_k"), ATTENTION),
    "flash_attn_varlen_qkvpacked_func": (
        "flash_attn_varlen_qkvpacked_func",
        VARLEN_QKV,
        ("",),
        ATTENTION,
    ),
    "flash_attn_varlen_kvpacked_func": (
        "flash_attn_varlen_kvpacked_func",
        VARLEN_KV,
        ("_q", "_k"),
        ATTENTION,
    ),
    "flash_attn_with_kvcache": ("flash_attn_with_kvcache", KVCACHE, (), {"causal": True}),
    "rms_norm": ("rms_norm", NORM, (), {}),
    "layer_norm": ("layer_norm", {**NORM, "bias": (1000,)}, (), {}),
}


def leaves(name: str, device: torch.device) -> dict:
    """The call's tensors by argument, and ``dout``; the same values on every device."""
    _, shapes, index_suffixes, _ = CALLS[name]
    generator = torch.Generator().manual_seed(0)  # one of its own: threads share torch's
    tensors = {}
    for argument, shape in shapes.items():
        dtype = torch.float32 if argument in FLOAT32 else torch.bfloat16
        tensors[argument] = torch.randn(shape, dtype=dtype, generator=generator).to(device)
        has_gradient = "dout" in shapes and argument not in ("dout", "alibi_slopes")
        tensors[argument].requires_grad_(has_gradient)
    for suffix in index_suffixes:
        tensors[f"cu_seqlens{suffix}"] = cumulative(LENGTHS, device)
    if "k_cache" in tensors:
        tensors["cache_seqlens"] = torch.tensor(CACHE_SEQLENS, dtype=torch.int32, device=device)
    return tensors


def run(kernel, name: str, device: torch.device, tensors: dict | None = None) -> list:
    """The result and all gradients, or the caches that were written to."""
    function, _, index_suffixes, options = CALLS[name]
    tensors = dict(leaves(name, device) if tensors is None else tensors)
    dout = tensors.pop("dout", None)
    lengths = {f"max_seqlen{suffix}": max(LENGTHS) for suffix in index_suffixes}
    out = getattr(kernel, function)(**tensors, **lengths, **options)
    if dout is None:
        return [out, tensors["k_cache"].clone(), tensors["v_cache"].clone()]
    inputs = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def main() -> None:
    kernel = get_kernel("org/flash-attn-norm", revision=os.environ.get("KERNEL_REVISION", "v1"))
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for index, head_dim in enumerate(HEAD_DIMS):
        order = devices if index % 2 == 0 else devices[::-1]
        for deterministic in (False, True):
            options = {"causal": True, "deterministic": deterministic}
            CALLS["head_dim"] = ("flash_attn_func", dense(head_dim), (), options)
            first, second = (run(kernel, "head_dim", device) for device in order)
            for a, b in zip(first, second, strict=True):
                # Without it, sums in another order move a result by one rounding of bfloat16.
                tolerances = (
                    {"rtol": 0, "atol": 0} if deterministic else {"rtol": 2**-7, "atol": 1e-4}
                )
                torch.testing.assert_close(a.cpu(), b.cpu(), **tolerances)
        print(head_dim)


if __name__ == "__main__":
    main()
