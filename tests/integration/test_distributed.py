"""Two processes over gloo give the gradients of one."""

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


@pytest.fixture(scope="module")
def results(kernel, tmp_path_factory) -> Path:
    """The folder with the gradients of each case."""
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(WORKER), str(folder)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[1])}
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
