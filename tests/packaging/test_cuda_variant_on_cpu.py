"""A CUDA variant serves CPU tensors: what plain pip's torch needs on a machine without a GPU.

That torch has `torch.version.cuda` set, so `kernels` offers it CUDA variants only. Here a CPU torch
that claims to be one takes its place.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tools.cuda_toolkit import get_toolkit

SCRIPT = """
import ctypes, os, sys
import torch

# What a CUDA torch brings and a CPU torch lacks: the CUDA runtime, and torch's current stream, for
# which only calls with CUDA tensors ask.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
sys.setdlopenflags(os.RTLD_LAZY)
torch.version.cuda = "13.1"

from kernels import get_kernel

kernel = get_kernel("org/flash-attn-norm", revision="v1")
torch.manual_seed(0)
q = torch.randn(2, 33, 4, 64, requires_grad=True)
k, v = (torch.randn(2, 33, 2, 64, requires_grad=True) for _ in range(2))
out = kernel.flash_attn_func(q, k, v, causal=True)
gradients = torch.autograd.grad(out.square().sum(), (q, k, v))

heads = [x.transpose(1, 2) for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
expected = expected.transpose(1, 2)
torch.testing.assert_close(out, expected)
torch.testing.assert_close(
    gradients, torch.autograd.grad(expected.square().sum(), (q, k, v)), rtol=1e-4, atol=1e-4
)

x = torch.randn(5, 96)
torch.testing.assert_close(
    kernel.rms_norm(x, torch.ones(96)), torch.nn.functional.rms_norm(x, (96,), torch.ones(96), 1e-6)
)
print(kernel.__file__)
"""


@pytest.mark.parametrize("cuda_version", ["13.0"])
def test_a_cuda_torch_without_a_gpu_gets_cpu_kernels(cuda_version):
    variant = f"torch-stable-abi210-cu{cuda_version.replace('.', '')}-x86_64-linux"
    folder = ROOT / "build" / variant
    assert folder.is_dir(), f"{variant} is not built; run `make build` first"
    toolkit = get_toolkit(cuda_version, ROOT / ".toolkit")
    runtime = toolkit.library_dir / toolkit.runtime_name
    environment = {**os.environ, "LOCAL_KERNELS": f"org/flash-attn-norm={ROOT / 'build'}"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(runtime)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(folder / "__init__.py")


def test_this_torch_gets_the_variant_of_its_backend(kernel):
    import torch

    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())
    expected = "cpu" if torch.version.cuda is None else "cuda"
    assert metadata["backend"]["type"] == expected
