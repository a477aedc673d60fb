"""Two GPUs in one process: a call runs where its tensors are, whatever device is current."""

import sys
import threading
from pathlib import Path

import processes
import pytest
import torch
from errors import assert_same_bits, poisoned_memory
from integration.two_gpus_worker import CALLS, HEAD_DIMS, leaves, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]

WORKER = Path(__file__).with_name("two_gpus_worker.py")
DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
FIRST, SECOND = DEVICES


def assert_same_results(ours: list, expected: list) -> None:
    for index, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert_same_bits(f"result {index}", a.cpu(), b.cpu())


@pytest.mark.parametrize("name", CALLS)
def test_on_a_device_that_is_not_current(kernel, name):
    expected = run(kernel, name, FIRST)
    torch.cuda.synchronize(FIRST)
    torch.cuda.reset_peak_memory_stats(FIRST)
    before = torch.cuda.memory_allocated(FIRST)
    with poisoned_memory():
        results = run(kernel, name, SECOND)
    assert torch.cuda.current_device() == FIRST.index
    assert all(tensor.device == SECOND for tensor in results)
    assert_same_results(results, expected)
    assert torch.cuda.max_memory_allocated(FIRST) == before, "it allocated on the current device"


@pytest.mark.parametrize("name", CALLS)
def test_in_turns(kernel, name):
    expected = run(kernel, name, FIRST)
    for device in DEVICES * 3:
        assert_same_results(run(kernel, name, device), expected)
    with torch.cuda.device(SECOND):
        for device in DEVICES:
            assert_same_results(run(kernel, name, device), expected)


@pytest.mark.parametrize("name", CALLS)
def test_in_two_threads(kernel, name):
    expected = [tensor.cpu() for tensor in run(kernel, name, FIRST)]
    start, failures = threading.Barrier(2), []

    def work(device):
        try:
            start.wait()
            for _ in range(10):
                assert_same_results(run(kernel, name, device), expected)
        except BaseException as failure:  # a thread's failure would go unseen
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_on_each(kernel, name):
    expected = run(kernel, name, FIRST)
    graphs, captured = [], []
    for device in DEVICES:
        with torch.cuda.device(device):
            # Leaves of before the capture: a gradient waits for the stream that made its leaf.
            inputs = leaves(name, device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run(kernel, name, device, inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # The stream that torch would choose is one for all: of the device that came first.
            with torch.cuda.graph(graph, stream=stream):
                captured.append(run(kernel, name, device, inputs))
            graphs.append(graph)
    for index in (1, 0, 1, 0):
        for tensor in captured[index]:
            tensor.zero_()
        with torch.cuda.device(DEVICES[index]):
            graphs[index].replay()
            torch.cuda.synchronize()
        assert_same_results(captured[index], expected)


def test_on_the_stream_of_the_tensors_device(kernel):
    """The second device's current stream counts, though the first device is current."""
    for name in CALLS:
        expected = run(kernel, name, FIRST)
        inputs = leaves(name, SECOND)
        values = [tensor.detach().clone() for tensor in inputs.values()]
        stream = torch.cuda.Stream(SECOND)
        with torch.no_grad():
            for tensor in inputs.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        torch.cuda.synchronize(SECOND)
        with torch.cuda.stream(stream), torch.cuda.device(FIRST):
            with torch.no_grad(), torch.cuda.device(SECOND):
                torch.cuda._sleep(20_000_000)  # the values come long after the calls are queued
                for tensor, value in zip(inputs.values(), values, strict=True):
                    tensor.copy_(value)
            results = run(kernel, name, SECOND, inputs)
        stream.synchronize()
        assert_same_results(results, expected)


def test_first_use_on_either_device(kernel):
    """Settings of a kernel that each device has for itself, shared memory above all: a process of
    its own has used none yet."""
    result = processes.run(
        [sys.executable, WORKER],
        environment={"PYTHONPATH": processes.python_path(WORKER.parents[1])},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == [str(head_dim) for head_dim in HEAD_DIMS]


@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_both_are_refused_by_name(kernel, name):
    inputs = leaves(name, FIRST)
    first = next(iter(inputs))
    for other in [key for key in inputs if key not in (first, "dout")]:
        mixed = {**inputs, other: inputs[other].to(SECOND)}
        said = {"kv": "k", "cu_seqlens": "cu_seqlens_q"}.get(other, other)  # as the op has it
        with pytest.raises(ValueError, match=f"^{said} is on cuda:1 but .* is on cuda:0"):
            run(kernel, name, FIRST, mixed)
