"""The part of the gate that runs in a fresh process: loads the variant and looks at it.

python -m tools.gate_checks --repo-id org/name --revision staging --device cpu --out FILE

The environment says where the loader finds the variant (HF_ENDPOINT, or LOCAL_KERNELS).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from .api_surface import merge, op_schemas, surface_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gate_checks", description=__doc__)
    parser.add_argument("--repo-id", required=True)
    parser.add_argument("--revision", required=True)
    parser.add_argument("--device", required=True, choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = {"machine": _machine(options.device), "checks": [], "api": {}}
    module = _check(result, "load", lambda: _load(options.repo_id, options.revision))
    if module is not None:
        surface = _check(result, "api", lambda: _surface(module, options.device))
        result["api"] = surface or {}
        _check(result, "opcheck", lambda: check_ops(module, options.device))
    options.out.write_text(json.dumps(result))
    return 0 if all(check["passed"] for check in result["checks"]) else 1


def _check(result: dict, name: str, run: Callable) -> object | None:
    start = time.monotonic()
    value, error = None, ""
    try:
        value = run()
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    seconds = round(time.monotonic() - start, 3)
    check = {"name": name, "passed": not error, "seconds": seconds, "detail": error}
    result["checks"].append(check)
    print(f"gate: {name}: {error or 'passed'} ({seconds} s)", flush=True)
    return value


def _load(repo_id: str, revision: str) -> ModuleType:
    from kernels import get_kernel

    return get_kernel(repo_id, revision=revision)


def _surface(module: ModuleType, device: str) -> dict:
    # A CUDA variant serves CPU tensors, too.
    devices = ["cpu", "cuda"] if device == "cuda" else [device]
    surface = merge([surface_of(module, each) for each in devices])
    missing = [name for name in surface["all"] if not hasattr(module, name)]
    if missing:
        raise AttributeError(f"__all__ names {', '.join(missing)}, which the package lacks")
    return surface


def _machine(device: str) -> dict:
    import kernels
    import torch

    capability = None
    name = _processor()
    if device == "cuda":
        name = torch.cuda.get_device_name()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "device": name,
        "capability": capability,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernels": kernels.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_ops(module: ModuleType, device: str) -> None:
    """`torch.library.opcheck` of every op of the build, with arguments taken from real calls.

    Raises:
        RuntimeError: an op that no sample call reaches.
        Exception: what opcheck raises.
    """
    import torch

    calls = _record_op_calls(module, device)
    unreached = sorted(set(op_schemas(module.__name__)) - {op._opname for op, _, _ in calls})
    if unreached:
        raise RuntimeError(f"no sample call reaches {', '.join(unreached)}")
    for op, arguments, keywords in calls:
        torch.library.opcheck(op, arguments, keywords)


def _record_op_calls(module: ModuleType, device: str) -> list[tuple]:
    """The calls of the build's own ops that the samples lead to, forward and backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    calls = []
    in_backward = False

    def own(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # A backward op gets saved tensors; it has no derivative to check.
        return value.detach().clone().requires_grad_(value.requires_grad and not in_backward)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == module.__name__:
                calls.append((op, tree_map(own, args), tree_map(own, kwargs or {})))
            return op(*args, **(kwargs or {}))

    for sample in _samples(module, device):
        in_backward = False
        with Recorder():
            result = sample()
            in_backward = True
            if result.requires_grad:
                result.float().sum().backward()
    return calls


def _samples(module: ModuleType, device: str) -> list[Callable]:
    """Calls that reach every op: GQA dense, packed and cached, the norms with all arguments."""
    import torch

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    def dense() -> torch.Tensor:
        k, v = leaf(2, 7, 2, 16), leaf(2, 7, 2, 16)
        return module.flash_attn_func(leaf(2, 5, 6, 16), k, v, causal=True, s_aux=leaf(6))

    def packed() -> torch.Tensor:
        rows = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        k, v = leaf(8, 2, 16), leaf(8, 2, 16)
        return module.flash_attn_varlen_func(leaf(8, 6, 16), k, v, rows, rows, 5, 5)

    def rms() -> torch.Tensor:
        return module.rms_norm(leaf(3, 32), leaf(32), residual=leaf(3, 32))

    def layer() -> torch.Tensor:
        return module.layer_norm(leaf(3, 32), leaf(32), leaf(32))

    def cached(*, appends: bool) -> torch.Tensor:
        q, k, v = (torch.randn(2, 1, h, 16, dtype=torch.bfloat16, device=device) for h in (6, 2, 2))
        k_cache, v_cache = torch.zeros(2, 2, 8, 2, 16, dtype=torch.bfloat16, device=device)
        lengths = torch.tensor([3, 5], dtype=torch.int32, device=device)
        new = {"k": k, "v": v} if appends else {}
        return module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, **new
        )

    samples = {
        "flash_attn_func": [dense],
        "flash_attn_varlen_func": [packed],
        "flash_attn_with_kvcache": [partial(cached, appends=False), partial(cached, appends=True)],
        "rms_norm": [rms],
        "layer_norm": [layer],
    }
    return [sample for name in samples if name in module.__all__ for sample in samples[name]]


if __name__ == "__main__":
    sys.exit(main())
