"""Seconds from get_kernel to the first attention call, from a cold and from a warm cache.

    python -m benchmarks.loading [--repeats N]

A Hub on this machine (tests/loopback_hub) serves the variant that the installed torch is offered,
so the network costs nothing: what is measured is the loader, the library and the Python files. Each
load happens in a fresh process. The import of torch, which every user pays anyway, stands alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
from kernels import get_local_kernel

from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/flash-attn-norm"

LOAD = """
import json, sys, time
start = time.perf_counter()
import torch
torch_imported = time.perf_counter()
from kernels import get_kernel
kernels_imported = time.perf_counter()
kernel = get_kernel(sys.argv[1], version=int(sys.argv[2]), trust_remote_code=True)
loaded = time.perf_counter()
device = "cuda" if torch.cuda.is_available() else "cpu"
q = torch.randn(1, 128, 8, 64, dtype=torch.bfloat16, device=device)
if device == "cuda":
    torch.cuda.synchronize()
ready = time.perf_counter()
kernel.flash_attn_func(q, q[:, :, :2], q[:, :, :2], causal=True).sum().item()
called = time.perf_counter()
print(json.dumps({
    "import torch s": torch_imported - start,
    "import kernels s": kernels_imported - torch_imported,
    "get_kernel s": loaded - kernels_imported,
    "first call s": called - ready,
    "get_kernel to first result s": loaded - kernels_imported + called - ready,
}))
"""

UPLOAD = """
import sys
from huggingface_hub import HfApi
repo_id, branch, folder, path = sys.argv[1:]
api = HfApi()
api.create_repo(repo_id, repo_type="kernel")
api.create_branch(repo_id, repo_type="kernel", branch=branch)
api.upload_folder(
    repo_id=repo_id, repo_type="kernel", revision=branch, folder_path=folder, path_in_repo=path,
    ignore_patterns=["__pycache__/*", "*.pyc"],
)
"""


@contextmanager
def local_hub(folder: Path):
    """Yields the environment in which huggingface_hub talks to it."""
    command = [sys.executable, "-m", "loopback_hub", str(folder), "--until-eof"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            dropped = ("LOCAL_KERNELS", "HF_HUB_OFFLINE", "HF_TOKEN", "KERNELS_CACHE")
            base = {key: value for key, value in os.environ.items() if key not in dropped}
            settings = dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))
            yield {**base, **settings, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        finally:
            server.terminate()


def load(environment: dict[str, str], home: str, version: int) -> dict[str, float]:
    environment = {**environment, "HF_HOME": home}
    command = [sys.executable, "-c", LOAD, REPO_ID, str(version)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    kernel = get_local_kernel(ROOT / "build")
    variant = Path(kernel.__file__).parent
    library = next(variant.glob("*.abi3.so"))
    version = json.loads((variant / "metadata.json").read_text())["version"]
    figures = []
    with tempfile.TemporaryDirectory() as scratch, local_hub(Path(scratch) / "hub") as environment:
        upload = [sys.executable, "-c", UPLOAD, REPO_ID, f"v{version}"]
        upload += [str(variant), f"build/{variant.name}"]
        subprocess.run(upload, env=environment, check=True)
        for cache in ("cold", "warm"):
            homes = [
                str(Path(scratch) / (cache if cache == "warm" else f"cold{i}"))
                for i in range(repeats)
            ]
            if cache == "warm":
                load(environment, homes[0], version)
            runs = [load(environment, home, version) for home in homes]
            medians = {
                key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]
            }
            figures.append({"cache": cache, **medians})
            print(figures[-1], flush=True)
    figures.append({"variant": variant.name, "library MB": round(library.stat().st_size / 1e6, 2)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(write_record(f"loading_{device.type}", kernel, device, figures))


if __name__ == "__main__":
    main()
