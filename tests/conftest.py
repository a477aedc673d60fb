"""Loads the built variant the way users do, once per test run: through `kernels.get_kernel`.

LOCAL_KERNELS points the loader at this checkout's build/; set it beforehand to test another one.
KERNEL_REVISION is the branch to load where a Hub serves the kernel, as in `make gate`.
"""

import os
from pathlib import Path

# Before anything imports kernels or huggingface_hub, which read these when they are imported.
REPO_ID = "org/flash-attn-norm"
REVISION = os.environ.get("KERNEL_REVISION", "v1")
ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT / 'build'}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Idle threads of torch's pool sleep: spinning ones take a small machine's cores from the processes
# that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.fixture(scope="session")
def kernel():
    """The package under test: the variant that this machine's torch is offered."""
    from kernels import get_kernel

    try:
        return get_kernel(REPO_ID, revision=REVISION)
    except FileNotFoundError as error:
        pytest.exit(f"no variant to test; run `make build` first\n{error}", returncode=2)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Every device that there is."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which not every machine has
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: a process for each core up to four, and one alone where there is a GPU, whose
    memory some tests take most of."""
    return 0 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"devices: cpu, {torch.cuda.get_device_name()}"
    return "devices: cpu; tests marked gpu are skipped"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
