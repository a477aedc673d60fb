"""The examples run and say what they should; TRL's is driven by test_trl.py."""

import re
import sys
from pathlib import Path

import processes
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _built(kernel):
    """A readable word about a missing build before anything starts."""


def test_train_tiny(tmp_path):
    """A short demo: the losses fall together, and the plot is there."""
    plot = tmp_path / "plots" / "demo.png"
    short = ["--steps", "12", "--seqlen", "128", "--plot", plot]
    result = processes.run([sys.executable, EXAMPLES / "train_tiny.py", *short])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Both copies learned, and learned the same" in result.stdout
    assert "9 RMSNorm modules run our layer" in result.stdout
    rows = re.findall(
        r"^ +\d+ +(\d+\.\d+) +(\d+\.\d+) +(\d\.\de[+-]\d+)", result.stdout, re.MULTILINE
    )
    assert len(rows) >= 10
    gap, largest = re.search(
        r"gradients of step 1 +(\S+) largest difference, (\S+) largest value", result.stdout
    ).groups()
    assert 0 < float(gap) < 1e-4 * float(largest), "other kernels round differently, no more"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not result.stderr.strip(), "warnings would bury the demo's text"


def test_train_tiny_without_a_build(tmp_path):
    result = processes.run(
        [sys.executable, EXAMPLES / "train_tiny.py"],
        environment={"LOCAL_KERNELS": f"org/flash-attn-norm={tmp_path}"},
    )
    assert result.returncode != 0
    assert "run `make build`" in result.stderr
    assert "Traceback" not in result.stderr


def test_kernel_config():
    result = processes.run([sys.executable, EXAMPLES / "kernel_config.py"])
    assert result.returncode == 0, result.stderr
    difference = re.search(r"logits from eager: (\S+)", result.stdout)[1]
    assert float(difference) < 1e-5
