"""Writes a measurement to benchmarks/results/, with what was measured, where and how."""

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with its vector instructions and the thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {capability}, {torch.get_num_threads()} threads"


def command_line() -> str:
    """The command that is running, with the script named from the root of the project."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parent.parent
    name = str(script.relative_to(root)) if script.is_relative_to(root) else sys.argv[0]
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    return " ".join([launcher, name, *sys.argv[1:]])


def write_record(name: str, kernel, device: torch.device, figures: list) -> Path:
    """Writes `figures` (a list of flat dicts, units in their keys) to results/<name>.json.

    The tree ids come from the metadata of the variant that was measured, so a record also tells the
    sources when it is written on a machine without git.
    """
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())
    record = {
        "trees": metadata["source-trees"],
        "ops": metadata["id"],
        "device": device_name(device),
        "torch": torch.__version__,
        "command": command_line(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "figures": figures,
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
