"""The gate: what it runs, what it records, what it does not take for a pass."""

import json
import socket
import subprocess
import sys
import textwrap
import time
import urllib.parse

import pytest
import torch
from releasing import CPU, CU132, ROOT

from tools.built import read_variant
from tools.gate_record import REQUIRED, read_record


def gate(ready, variant: str = CPU, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.gate", variant, "--root", str(ready.root), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def record_of(ready, variant: str = CPU):
    return read_record(ready.build / f"{variant}.gate-{torch.__version__}.json")


def test_a_pass(ready):
    before = ready.git("status", "--porcelain")
    result = gate(ready)
    assert result.returncode == 0, result.stdout + result.stderr
    record = record_of(ready)
    variant = read_variant(ready.build / CPU)
    assert record.passed
    assert [check.name for check in record.checks] == list(REQUIRED)
    assert (record.digest, record.library_sha256) == (variant.digest, variant.library_sha256)
    assert record.commit == ready.git("rev-parse", "HEAD")
    assert (record.loaded_through, record.why_local) == ("get_kernel", "")
    assert record.torch == torch.__version__
    assert record.device
    assert record.command.startswith(f"python -m tools.gate {CPU}")
    assert record.api["all"] == ["name"]
    assert record.api["functions"] == {"name": "(op_name)"}
    assert ready.git("status", "--porcelain") == before
    assert ready.release("--to", str(ready.root.parent / "store"))[0] == 0


@pytest.mark.parametrize("arguments", [(), ("--parallel", "3")], ids=["in turn", "at a time"])
def test_suites_that_fail_or_run_nothing(ready, arguments):
    skipped = "import pytest\n@pytest.mark.skip\ndef test_it():\n    pass\n"
    ready.write("tests/norms/test_norms.py", skipped)
    ready.write("tests/attention/test_gqa_backward.py", "def test_it():\n    assert False\n")
    result = gate(ready, CPU, *arguments)
    assert result.returncode == 1
    record = record_of(ready)
    assert not record.passed
    assert [check.name for check in record.checks] == list(REQUIRED)
    failed = {check.name: check.detail for check in record.checks if not check.passed}
    assert failed == {"gqa backward": "1 failures", "norms": "1 skipped"}
    assert "failed (gqa backward, norms)" in result.stdout


def test_no_suite_at_a_time(ready):
    result = gate(ready, CPU, "--parallel", "0")
    assert result.returncode == 2
    assert "--parallel must be at least 1, was 0" in result.stderr


def test_a_variant_that_does_not_load(ready):
    ready.stamp(CPU, code="import nowhere\n")
    result = gate(ready)
    assert result.returncode == 1
    record = record_of(ready)
    assert [(check.name, check.passed) for check in record.checks] == [("load", False)]
    assert "No module named 'nowhere'" in record.checks[0].detail
    assert "failed (load, api, opcheck, gqa backward, norms)" in result.stdout


def test_a_changed_file(ready):
    (ready.build / CPU / "_ops.py").write_text("")
    result = gate(ready)
    assert result.returncode == 1
    assert "is not as it was built: File hash mismatch for _ops.py" in result.stderr
    assert not list(ready.build.glob("*.json"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for machines without a GPU")
def test_a_cuda_variant_without_a_gpu(ready):
    ready.stamp(CU132)
    result = gate(ready, CU132)
    assert result.returncode == 1
    assert f"{CU132}: its gate needs a GPU and a CUDA build of torch" in result.stderr


def test_no_such_variant(ready):
    result = gate(ready, "torch-stable-abi210-cu999-x86_64-linux")
    assert result.returncode == 1
    assert "no variant there: metadata.json is missing" in result.stderr


def test_a_variant_that_this_torch_is_not_offered(ready):
    """Loaded from its folder, which skips the loader's rule, and the record says so."""
    newer = CPU.replace("abi210", "abi299")
    ready.stamp(newer)
    ready.write("tests/attention/test_gqa_backward.py", "def test_it():\n    pass\n")
    result = gate(ready, newer)
    assert result.returncode == 0, result.stdout + result.stderr
    record = record_of(ready, newer)
    assert record.loaded_through == "get_local_kernel"
    assert "is too new for environment Torch version" in record.why_local


def test_a_record_is_json_with_its_verdict(ready):
    path = ready.pass_gate()
    assert json.loads(path.read_text())["passed"] is True
    assert read_record(path).summary() == "passed on a device, torch 2.13.0"


def test_a_function_brings_its_suite(ready):
    path = ready.pass_gate(api={"all": ["flash_attn_with_kvcache", "name"]})
    assert read_record(path).summary() == "failed (kv cache) on a device, torch 2.13.0"


def test_a_parameter_brings_its_suite(ready):
    functions = {"flash_attn_with_kvcache": "(q, k_cache, *, k_descale=None)"}
    path = ready.pass_gate(api={"all": ["flash_attn_with_kvcache"], "functions": functions})
    told = read_record(path).summary()
    assert told == "failed (kv cache, float8 cache) on a device, torch 2.13.0"


def test_its_hub_ends_with_it(tmp_path):
    """Also when the gate is killed, as a timeout does, and cannot end anything itself."""
    code = f"""
        import time
        from pathlib import Path
        from tools.gate import _staging_hub
        with _staging_hub(Path({str(ROOT)!r}), Path({str(tmp_path)!r}), "org") as settings:
            print(settings["HF_ENDPOINT"], flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gate:
        address = urllib.parse.urlsplit(gate.stdout.readline().strip())
        where = (address.hostname, address.port)
        socket.create_connection(where, timeout=30).close()
        gate.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(where, timeout=30).close()
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail(f"the Hub at {where} still answers")
