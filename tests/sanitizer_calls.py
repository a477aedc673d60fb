"""Small calls of every kernel, to run under compute-sanitizer:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/sanitizer_calls.py [GROUP ...] [--head-dims N]

Inputs are made on the CPU: torch launches next to nothing of its own. Each call says its name, so
that a finding can be told to belong to it. docs/building.md has what was found.
"""

import argparse
import os
import time
from pathlib import Path

REPO_ID = "org/flash-attn-norm"
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={Path(__file__).resolve().parents[1] / 'build'}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from kernels import get_kernel  # noqa: E402

kernel = get_kernel(REPO_ID, revision=os.environ.get("KERNEL_REVISION", "v1"))
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]

parser = argparse.ArgumentParser()
parser.add_argument(
    "groups",
    nargs="*",
    default=["attention", "shared_sums", "portable", "few_keys", "kvcache", "norms"],
)
parser.add_argument("--head-dims", nargs="*", type=int)
options = parser.parse_args()


def chosen(*head_dims) -> list:
    return [d for d in head_dims if options.head_dims is None or d[0] in options.head_dims]


def randn(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(shape).to(dtype).cuda().requires_grad_(grad)


def say(*what) -> None:
    print(f"{time.strftime('%H:%M:%S')} call", *what, flush=True)


def run(function, inputs, **options) -> None:
    """Both passes."""
    out = function(**inputs, **options)
    leaves = [x for x in (*inputs.values(), *options.values()) if getattr(x, "requires_grad", 0)]
    dout = torch.randn(out.shape).to(out.dtype).cuda()
    torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()


def dense(head_dim, head_dim_v, seqlen_q=130, seqlen_k=150) -> dict:
    return {
        "q": randn(1, seqlen_q, 4, head_dim),
        "k": randn(1, seqlen_k, 2, head_dim),
        "v": randn(1, seqlen_k, 2, head_dim_v),
    }


def packed(head_dim, head_dim_v) -> dict:
    """Sequences of 70, 0 and 60 rows, and 3 that none covers."""
    bounds = torch.tensor([0, 70, 70, 130], dtype=torch.int32).cuda()
    inputs = {name: tensor[0] for name, tensor in dense(head_dim, head_dim_v, 133, 133).items()}
    return {**inputs, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}


def attention() -> None:
    """On Hopper its own kernels, but for deterministic gradients of head dims above 128."""
    slopes = torch.rand(4).cuda()
    for head_dims in chosen(*HEAD_DIMS):
        for terms in (
            {},
            {"causal": True},
            {"window_size": (40, 10), "deterministic": True},
            {"softcap": 2.0, "alibi_slopes": slopes, "causal": True},
        ):
            say("attention", head_dims, *terms)
            run(kernel.flash_attn_func, dense(*head_dims), **terms)
        for deterministic in (False, True):
            say("packed", head_dims, deterministic)
            run(
                kernel.flash_attn_varlen_func,
                packed(*head_dims),
                max_seqlen_q=70,
                max_seqlen_k=70,
                causal=True,
                deterministic=deterministic,
            )


def shared_sums() -> None:
    """Without a mask and with many heads: Hopper's backward kernels round dQ themselves, and heads
    share the places of its sums. From 1025 keys on steps of head dim 128 have 80 queries."""
    sizes = [(11, 90, 1030, 4, 128, 128), (30, 70, 70, 4, 256, 256), (30, 70, 130, 4, 192, 128)]
    for batch_size, seqlen_q, seqlen_k, heads, *head_dims in sizes:
        say("shared sums", batch_size, head_dims)
        q = randn(batch_size, seqlen_q, heads, head_dims[0])
        k, v = (randn(batch_size, seqlen_k, heads, dim) for dim in head_dims)
        run(kernel.flash_attn_func, {"q": q, "k": k, "v": v})
        run(kernel.flash_attn_func, {"q": q, "k": k, "v": v}, softcap=2.0)
    for terms in ({"deterministic": True}, {}):
        say("wide steps", *terms)
        run(kernel.flash_attn_func, dense(128, 128, 170, 1100), **terms)


def portable() -> None:
    """What only the portable kernels do: a bias with its gradient, dropout, head dim 512."""
    shapes = [(1, 4, 130, 150), (1, 1, 1, 150), (1, 4, 1, 150)]
    for head_dims in chosen(*HEAD_DIMS, (512, 512)):
        for shape, dtype in [(s, d) for s in shapes for d in (torch.float32, torch.bfloat16)]:
            say("bias", head_dims, shape, dtype)
            bias = randn(*shape, dtype=dtype)
            deterministic = dtype == torch.float32
            run(
                kernel.flash_attn_func,
                dense(*head_dims),
                attn_bias=bias,
                deterministic=deterministic,
            )
    for head_dims in chosen((64, 64), (128, 128), (512, 512)):
        odd = {"attn_bias": randn(1, 1, 130, 151)[..., :150].detach().requires_grad_()}
        sink = {"s_aux": randn(4)}
        for terms in (odd, {"dropout_p": 0.1, **sink}, {"dropout_p": 0.1, "causal": True}):
            say("terms", head_dims, *terms)
            run(kernel.flash_attn_func, dense(*head_dims), **terms)
        bias = randn(4, 133, 70)
        say("packed bias", head_dims)
        run(
            kernel.flash_attn_varlen_func,
            packed(*head_dims),
            max_seqlen_q=70,
            max_seqlen_k=70,
            attn_bias=bias,
        )


def few_keys() -> None:
    """Where delta is computed once more: few keys (in two parts there), some sequences of a packed
    call with a sink, dropout."""
    for head_dims in chosen((64, 64), (128, 128), (72, 96), (512, 512)):
        bias = randn(1, 4, 130, 20)
        for terms in ({}, {"s_aux": randn(4), "deterministic": True}, {"attn_bias": bias}):
            say("few keys", head_dims, *terms)
            run(kernel.flash_attn_func, dense(*head_dims, 130, 20), **terms, causal=True)
        say("dropout", head_dims)
        run(kernel.flash_attn_func, dense(*head_dims, 130, 20), dropout_p=0.1)
        run(kernel.flash_attn_func, dense(*head_dims), dropout_p=0.1)
        say("a few keys in a packed call", head_dims)
        inputs = packed(*head_dims)
        inputs["cu_seqlens_k"] = torch.tensor([0, 20, 20, 130], dtype=torch.int32).cuda()
        lengths = {"max_seqlen_q": 70, "max_seqlen_k": 110}
        run(kernel.flash_attn_varlen_func, inputs, **lengths, s_aux=randn(4), causal=True)


def kvcache() -> None:
    """Append with rotary embedding, attention in splits, their combination; pages or none."""
    table = torch.tensor([[7, 2, 5, 0, 1, 9, 3, 8], [6, 4, 11, 10, 12, 13, 14, 15]]).int().cuda()
    lengths = torch.tensor([100, 61], dtype=torch.int32).cuda()
    cos, sin = (randn(256, 16, grad=False) for _ in range(2))
    for head_dims in chosen((64, 64), (128, 128), (192, 128), (256, 256), (576, 512)):
        for rows in (1, 40):
            for paged in (False, True):
                shape = (16, 16, 2) if paged else (2, 128, 2)
                caches = [randn(*shape, dim, grad=False) for dim in head_dims]
                new = [randn(2, rows, 2, dim, grad=False) for dim in head_dims]
                q = randn(2, rows, 4, head_dims[0], grad=False)
                say("cache", head_dims, rows, "paged" if paged else "contiguous")
                for splits in (1, 3):
                    kernel.flash_attn_with_kvcache(
                        q,
                        *caches,
                        *(new if rows == 1 else ()),
                        cache_seqlens=lengths,
                        causal=True,
                        num_splits=splits,
                        block_table=table if paged else None,
                        **({"rotary_cos": cos, "rotary_sin": sin} if rows == 1 else {}),
                    )
                torch.cuda.synchronize()


def cache_tiles() -> None:
    """Pages of whole tiles, in as many splits as there are tiles; keys that hold the values."""
    table = torch.arange(39, -1, -1).int().view(2, 20).cuda()
    lengths = torch.tensor([1270, 61], dtype=torch.int32).cuda()
    calls = {"block_table": table, "cache_seqlens": lengths, "causal": True}
    for head_dims in chosen((64, 64), (128, 128), (192, 128), (256, 256)):
        caches = [randn(40, 64, 1, dim, grad=False) for dim in head_dims]
        for splits in (1, 4, 20):
            say("pages of 64", head_dims, splits)
            q = randn(2, 1, 4, head_dims[0], grad=False)
            kernel.flash_attn_with_kvcache(q, *caches, num_splits=splits, **calls)
        torch.cuda.synchronize()
    keys = randn(40, 64, 1, 576, grad=False)
    for heads in (16, 128):
        for splits in (1, 4):
            say("latent", heads, splits)
            q = randn(2, 1, heads, 576, grad=False)
            kernel.flash_attn_with_kvcache(q, keys, keys[..., :512], num_splits=splits, **calls)
        torch.cuda.synchronize()


def float8_cache() -> None:
    """The same with a float8 cache: pages of 5, 16 and 64 rows or none; few rows and more."""
    lengths = torch.tensor([318, 61], dtype=torch.int32).cuda()
    for head_dims in chosen((64, 64), (128, 128), (192, 128), (256, 256), (40, 72)):
        for page_size in (None, 5, 16, 64):
            rows_of_entry = page_size or 320
            pages = 320 // rows_of_entry
            table = torch.arange(2 * pages - 1, -1, -1).int().view(2, -1).cuda()
            caches = [
                randn(2 * pages, rows_of_entry, 2, dim, grad=False).to(torch.float8_e4m3fn)
                for dim in head_dims
            ]
            for rows in (1, 20, 40):
                new = [randn(2, rows, 2, dim, grad=False) for dim in head_dims]
                q = randn(2, rows, 4, head_dims[0], grad=False)
                for splits in (1, 3):
                    say("float8", head_dims, page_size, rows, splits)
                    kernel.flash_attn_with_kvcache(
                        q,
                        *caches,
                        *(new if rows == 1 else ()),
                        cache_seqlens=lengths,
                        causal=True,
                        num_splits=splits,
                        page_table=table if page_size else None,
                        k_descale=torch.ones(2, 2, device="cuda"),
                        v_descale=0.5,
                    )
                torch.cuda.synchronize()


def both_kinds() -> None:
    """Forward passes of packed batches that two kinds of kernel share, of few tiles, of expanded
    keys, and of more tiles than multiprocessors."""
    batches = (
        ([600, *[1] * 20, 0, 3], [9] * 23),
        ([1, 200, 0, 2], [3000, 200, 10, 1500]),
        ([50] * 4,) * 2,
    )
    for head_dims in chosen((64, 64), (128, 128), (256, 256)):
        for lengths in batches:
            cu_seqlens_q, cu_seqlens_k = (
                torch.tensor([0, *x]).cumsum(0).to(torch.int32).cuda() for x in lengths
            )
            q = randn(sum(lengths[0]) + 3, 4, head_dims[0], grad=False)
            k, v = (randn(sum(lengths[1]) + 3, 2, dim, grad=False) for dim in head_dims)
            for keys in (k, k[:, :1].expand(k.shape)):
                say("both kinds", head_dims, len(lengths[0]), keys.stride(1))
                kernel.flash_attn_varlen_func(
                    q, keys, v, cu_seqlens_q, cu_seqlens_k, 600, 3000, causal=True
                )
                torch.cuda.synchronize()
        say("claims", head_dims)
        q, k, v = (randn(4, 300, 16, dim, grad=False) for dim in (head_dims[0], *head_dims))
        kernel.flash_attn_func(q, k, v, causal=True)
        torch.cuda.synchronize()


def norms() -> None:
    for hidden_size in (100, 128, 1024, 3584, 4096, 8192, 16384, 65536):
        for rows in (3, 200):
            for dtype in (torch.bfloat16, torch.float32):
                say("norms", hidden_size, rows, dtype)
                inputs = {"x": randn(rows, hidden_size, dtype=dtype), "weight": randn(hidden_size)}
                run(kernel.rms_norm, inputs)
                run(kernel.rms_norm, {**inputs, "residual": randn(rows, hidden_size, dtype=dtype)})
                run(kernel.layer_norm, {**inputs, "bias": randn(hidden_size)})


GROUPS = {
    "attention": attention,
    "shared_sums": shared_sums,
    "portable": portable,
    "few_keys": few_keys,
    "kvcache": kvcache,
    "cache_tiles": cache_tiles,
    "float8_cache": float8_cache,
    "both_kinds": both_kinds,
    "norms": norms,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in options.groups:
        GROUPS[name]()
    print("done", flush=True)
