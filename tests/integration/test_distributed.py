"""Two processes over gloo give the gradients of one, and train as one does."""

import json
import sys
from pathlib import Path

import processes
import pytest
import torch
from integration.distributed_worker import (
    BATCH_SIZE,
    CASES,
    SEQLEN,
    backward,
    case_model,
    full_gradients,
)
from integration.models import random_tokens

WORKER = Path(__file__).with_name("distributed_worker.py")
TESTS = WORKER.parents[1]
EXAMPLES = TESTS.parent / "examples"


@pytest.fixture(scope="module")
def results(kernel, tmp_path_factory) -> Path:
    """The folder with the gradients of each case."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(WORKER), str(folder)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": processes.python_path(TESTS, EXAMPLES)}
    result = processes.run(command, environment=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_one_process(case, results):
    model = case_model(case)
    backward(model, random_tokens(BATCH_SIZE, SEQLEN))
    expected = full_gradients(model)
    actual = torch.load(results / f"{case}.pt")
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def losses_of_one_process(kernel, tmp_path_factory) -> list[float]:
    return train(tmp_path_factory.mktemp("one"), [sys.executable], "one")


def train(folder: Path, launcher: list[str], sharding: str) -> list[float]:
    """The losses of examples/train_distributed.py."""
    output = folder / "losses.json"
    command = [*launcher, EXAMPLES / "train_distributed.py", "--sharding", sharding]
    command += ["--steps", "12", "--seqlen", "64", "--output", output]
    result = processes.run(command, environment={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output.read_text())["losses"]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2", "tp"])
def test_training_equals_one_process(sharding, losses_of_one_process, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    losses = train(tmp_path, [*launcher, "--nproc-per-node=2"], sharding)
    torch.testing.assert_close(losses, losses_of_one_process, rtol=1e-5, atol=0)
    assert losses[-1] < losses[0] - 0.1
