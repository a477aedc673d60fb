"""Ring attention over several processes gives what attention on one device gives."""

import sys
from pathlib import Path

import processes
import pytest
import torch
from attention.comparison import allowed_errors, run_formula
from errors import assert_within
from integration.context_parallel_worker import cases, load_example

WORKER = Path(__file__).with_name("context_parallel_worker.py")
TESTS = WORKER.parents[1]
WORLD_SIZES = {"cpu": (2, 3), "cuda": (2,)}
EXAMPLE = load_example()

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


def places() -> list:
    return [
        pytest.param(
            (device, world_size),
            name,
            id=f"{device}-{world_size}-{name}",
            marks=[pytest.mark.gpu, needs_two_gpus] if device == "cuda" else [],
        )
        for device, sizes in WORLD_SIZES.items()
        for world_size in sizes
        for name in cases(device)
    ]


@pytest.fixture(scope="module")
def results(kernel, tmp_path_factory):
    """A function that gives the folder with the results of all cases, made on first use."""
    folders = {}

    def folder(device: str, world_size: int) -> Path:
        if (device, world_size) not in folders:
            folders[device, world_size] = tmp_path_factory.mktemp(f"{device}-{world_size}")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={world_size}", str(WORKER)]
            command += [str(folders[device, world_size]), device]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": processes.python_path(TESTS)}
            result = processes.run(command, environment=environment)
            assert result.returncode == 0, result.stderr[-3000:]
        return folders[device, world_size]

    return folder


@pytest.mark.parametrize(("place", "name"), places())
def test_equals_one_device(place, name, results):
    device, world_size = place
    case = cases(device)[name]
    zigzag = EXAMPLE.Zigzag(case.lengths, world_size)
    folder = results(device, world_size)
    parts = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(world_size)]
    rows = torch.cat([zigzag.rows(rank) for rank in range(world_size)])

    inputs = case.inputs(torch.device("cpu"))
    gradients_of_results = {"dout": inputs.pop("dout")}
    gradients_of_results["dsoftmax_lse"] = inputs.pop("dsoftmax_lse", None)
    options = {**gradients_of_results, "causal": case.causal}
    expected = run_formula(inputs, dtype=torch.float64, **options)
    allowed = allowed_errors(inputs, expected, **options)
    for result, reference in expected.items():
        tensors = [part[result] for part in parts]
        if result == "ds_aux":  # of a parameter: summed over the processes
            ours = sum(tensors)
        else:
            dim = 1 if result == "softmax_lse" else 0
            ours = torch.empty_like(reference, dtype=tensors[0].dtype)
            ours.index_copy_(dim, rows, torch.cat(tensors, dim))
        assert_within(result, ours, reference, allowed[result])


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", 2)),
        pytest.param(("cpu", 3)),
        pytest.param(("cuda", 2), marks=[pytest.mark.gpu, needs_two_gpus]),
    ],
    ids=lambda place: f"{place[0]}-{place[1]}",
)
def test_gradients_travel_while_attention_runs_backward(place, results):
    """Sent before the attention of the step before, waited for after it."""
    world_size = place[1]
    expected = [f"attention {world_size - 1}"]
    for step in reversed(range(world_size - 1)):
        expected += ["send", f"attention {step}", "wait"]
    for rank in range(world_size):
        assert torch.load(results(*place) / f"order-{rank}.pt") == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_zigzag_holds_every_row_once(world_size):
    zigzag = EXAMPLE.Zigzag((100, 1, 0, 3, 1027), world_size)
    rows = torch.cat([zigzag.rows(rank) for rank in range(world_size)])
    assert torch.equal(rows.sort().values, torch.arange(sum(zigzag.lengths)))
    starts = torch.tensor([0, *zigzag.lengths]).cumsum(0)
    for rank in range(world_size):
        rows, positions = zigzag.rows(rank), zigzag.positions(rank)
        assert len(rows) == zigzag.num_rows(rank)
        sequence = torch.searchsorted(starts, rows, right=True) - 1
        assert torch.equal(rows - starts[sequence], positions)


def test_zigzag_balances_a_causal_mask():
    """The pairs of query and key that each process computes differ by less than a chunk's rows."""
    zigzag = EXAMPLE.Zigzag((4000,), 4)
    work = [int((zigzag.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(work) - min(work) <= 0.001 * sum(work)


def test_options_that_need_whole_sequences_are_refused():
    with pytest.raises(ValueError, match="window_size"):
        EXAMPLE.ring_attention(None, None, None, None, None, window_size=(8, 0))
