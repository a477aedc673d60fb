"""Supervised fine-tuning with TRL's command line and our attention, without a network.

Makes a tiny Qwen3-shaped model, a tokenizer and a dataset (examples/tiny_model.py), then runs
`trl sft` on them. Further arguments go to `trl sft` and win over the ones here.

    python examples/sft_trl.py                     packed sequences, two steps
    python examples/sft_trl.py --packing false     padded batches
    python examples/sft_trl.py --max_steps 50 --logging_steps 10

For your own model and data call `trl sft` yourself, as docs/integration.md shows: name them in
--model_name_or_path and --dataset_name, and keep --attn_implementation. With LOCAL_KERNELS set to a
build the kernels come from there. Without it they come from the Hub and, as the publisher is not on
its list of trusted ones, need --model_init_kwargs '{"allow_all_kernels": true}'
(--trust_remote_code does not reach kernels).
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tiny_model import write_model_and_data

REPO_ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/flash-attn-norm"


def sft_command(folder: Path) -> list[str]:
    """The command line, with what a CPU can do in seconds."""
    settings = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data",
        "attn_implementation": f"{REPO_ID}@v3",
        "packing": "true",  # implies padding-free: sequences in one row, told apart by cu_seqlens
        "max_length": 256,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": folder / "output",
    }
    if not torch.cuda.is_available():
        settings |= {"use_cpu": "true", "bf16": "false"}
    trl = Path(sys.executable).with_name("trl")
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    return [str(trl), "sft", *arguments]


def main() -> int:
    # The build of this checkout in place of the Hub's; nothing is downloaded.
    local = {"LOCAL_KERNELS": f"{REPO_ID}={REPO_ROOT}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_and_data(folder)
        command = [*sft_command(folder), *sys.argv[1:]]
        print("$", shlex.join(command), flush=True)
        environment = {**local, "HF_HOME": str(folder / "cache"), **os.environ}
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
