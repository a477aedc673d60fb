"""TRL's command line: supervised fine-tuning of a tiny model, two steps.

The learning rate is high, so that the second loss depends on the first step's gradients.
"""

import functools
import json
import re
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("--learning_rate=1e-2", "--max_length=512")


@functools.cache
def sft(*arguments: str) -> tuple[list[dict], str]:
    """What `trl sft` logged at each step, and all of its output."""
    command = [sys.executable, str(ROOT / "examples" / "sft_trl.py"), *SETTINGS, *arguments]
    result = processes.run(command)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    lines = re.findall(r"\{'loss':[^}]*\}", output)
    return [json.loads(line.replace("'", '"')) for line in lines], output


def losses(steps: list[dict]) -> list[float]:
    return [float(step["loss"]) for step in steps]


@pytest.fixture(autouse=True)
def _built(kernel):
    """A readable word about a missing build before the long way through TRL."""


def test_padded_batches():
    steps, _ = sft("--packing=false")
    expected, _ = sft("--packing=false", "--attn_implementation=eager")
    assert len(steps) == 2
    assert losses(steps) == pytest.approx(losses(expected), abs=2e-3)  # printed to three decimals
    assert losses(steps)[1] != losses(steps)[0]


def test_padding_free():
    """The same sequences in one row give the same losses as padded."""
    steps, _ = sft("--packing=false", "--padding_free=true", "--max_length=None")
    expected, _ = sft("--packing=false")
    assert losses(steps) == pytest.approx(losses(expected), abs=2e-3)


def test_packing():
    """Packed rows hold several sequences each, which must not see one another."""
    steps, output = sft("--packing=true")
    assert len(steps) == 2
    assert float(steps[0]["num_tokens"]) > 512
    # A random model's first loss is that of guessing among the vocabulary: ln(512) = 6.24.
    assert losses(steps)[0] == pytest.approx(6.24, abs=0.1)
    assert losses(steps)[1] < losses(steps)[0]
    # TRL once warned that a name with its revision is no flash implementation
    # (huggingface/trl#6984).
    told = [line for line in output.splitlines() if not line.startswith("$ ")]
    assert not re.findall("(?i).*attention.*", "\n".join(told))
