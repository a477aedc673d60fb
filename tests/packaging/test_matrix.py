"""The matrix: every variant from one clean commit, resumed where it stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import processes
import pytest
from releasing import CPU, ROOT

from tools.clang_as_nvcc import clang_options, fatbinary_options
from tools.matrix import Row, format_table


def matrix(ready, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.matrix", "--root", str(ready.root)]
    command += ["--only", "cpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def state(result: subprocess.CompletedProcess) -> str:
    """The state of the CPU variant in the table."""
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith(f"{CPU}  "))
    return re.split(r"\s{2,}", line)[1]


def test_builds_checks_and_resumes(ready):
    result = matrix(ready)
    assert state(result) == "built"
    commit = ready.git("rev-parse", "HEAD")
    assert f"commit {commit}" in result.stdout
    assert f"[1/1] {CPU}" in result.stdout
    assert "abi3, manylinux_2_28" in result.stdout
    assert ready.variant().commit == commit
    assert ready.git("status", "--porcelain") == ""

    again = matrix(ready)
    assert state(again) == "as before"
    assert "[1/1]" not in again.stdout

    (ready.build / CPU / "_ops.py").write_text("# damaged")
    assert state(matrix(ready)) == "built"
    shutil.rmtree(ready.build / CPU)
    assert state(matrix(ready)) == "built"
    ready.commit()
    assert state(matrix(ready)) == "built"


def test_killed_while_it_compiles(ready, tmp_path):
    """What was compiled is not compiled again; no variant is there before it is whole."""
    shutil.rmtree(ready.build)
    shutil.rmtree(ready.root / ".build", ignore_errors=True)
    reached = tmp_path / "reached"
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *other.cpp*) touch {reached}; exec sleep 60;; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    path = f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "tools.matrix", "--root", str(ready.root)]
    process = subprocess.Popen(
        [*command, "--only", "cpu", "--jobs", "1"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not reached.exists():
        assert process.poll() is None
        time.sleep(0.05)
    processes.kill_session(process.pid)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not ready.build.exists()

    result = matrix(ready)
    assert state(result) == "built"
    assert "csrc/other.cpp" in result.stdout
    assert "csrc/answer.cpp" not in result.stdout
    assert state(matrix(ready)) == "as before"


def test_refuses_a_dirty_tree(ready):
    ready.write("csrc/answer.cpp", "int answer() { return 43; }\n")
    result = matrix(ready)
    assert result.returncode == 1
    assert "the working tree differs from the commit (csrc/answer.cpp)" in result.stderr
    ready.git("checkout", "-q", ".")
    ready.write("torch-ext/tiny_kernel/new.py", "")  # would go into the variant
    assert "differs from the commit" in matrix(ready).stderr


def test_another_commit_in_a_worktree(ready):
    old = ready.git("rev-parse", "HEAD")
    before = ready.snapshot()
    ready.write("torch-ext/tiny_kernel/__init__.py", "raise RuntimeError\n")
    ready.commit()
    ready.write("uncommitted.txt", "stays out")
    result = matrix(ready, "--commit", "HEAD~1")
    assert state(result) == "built"
    folder = ready.root / "dist" / old[:12] / CPU
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["source-commit"], metadata["source-dirty"]) == (old, False)
    assert "RuntimeError" not in (folder / "__init__.py").read_text()
    assert state(matrix(ready, "--commit", old)) == "as before"
    build = {k: v for k, v in ready.snapshot().items() if k.startswith("build/")}
    assert build == {k: v for k, v in before.items() if k.startswith("build/")}
    assert ready.git("worktree", "list").count("\n") == 0

    result = matrix(ready, "--commit", "nothing")
    assert result.returncode == 1
    assert "COMMIT=nothing: git knows no such commit" in result.stderr


def test_a_failed_variant(ready):
    before = ready.snapshot()
    ready.write("csrc/answer.cpp", "int answer() { return wrong; }\n")
    ready.commit()
    result = matrix(ready)
    assert result.returncode == 1
    assert "was not declared in this scope" in result.stdout
    assert f"error: failed: {CPU}" in result.stderr
    build = {k: v for k, v in ready.snapshot().items() if k.startswith(f"build/{CPU}")}
    assert build == {k: v for k, v in before.items() if k.startswith(f"build/{CPU}")}
    ready.git("revert", "--no-edit", "HEAD")
    assert state(matrix(ready)) == "built"


def test_an_unknown_variant(ready):
    result = matrix(ready, "--only", "11.8")
    assert result.returncode == 1
    assert "--only 11.8: build.toml and PyPI give cpu, 13.0, 13.2" in result.stderr


def test_table():
    rows = [
        Row("cpu", "built", "", 1_234_567, 12.4, "abi3"),
        Row("cuda", "failed", seconds=3.0, checks="the messages are above"),
    ]
    assert format_table(rows, "abc").splitlines() == [
        "",
        "commit abc",
        "variant  state   architectures  MB    seconds  checks",
        "cpu      built   -              1.23  12       abi3",
        "cuda     failed  -              -     3        the messages are above",
    ]


@pytest.mark.parametrize(
    ("nvcc", "clang"),
    [
        (["-gencode=arch=compute_90a,code=sm_90a"], ["--offload-arch=sm_90a"]),
        (["-gencode=arch=compute_80,code=compute_80"], []),
        (["-Xcompiler=-fPIC,-fno-gnu-unique,-g"], ["-fPIC", "-g"]),
        (["--expt-relaxed-constexpr", "-Xptxas=-v", "--threads=2"], []),
        (["-O3", "-DX=1", "-c", "a.cu", "-o", "a.o"], ["-O3", "-DX=1", "-c", "a.cu", "-o", "a.o"]),
    ],
)
def test_clang_as_nvcc(nvcc, clang):
    options = clang_options(nvcc, "/cuda")
    assert options[:3] == ["-x", "cuda", "--cuda-path=/cuda"]
    assert [option for option in options[3:] if not option.startswith("-Wno-")] == clang


def test_clang_as_nvcc_fatbinary():
    options = [
        "--create",
        "x",
        "--image=profile=sm_90a,file=a.o",
        "--image=profile=compute_80,file=b",
    ]
    assert fatbinary_options(options) == [
        "--create",
        "x",
        "--image3=kind=elf,sm=90a,file=a.o",
        "--image3=kind=ptx,sm=80,file=b",
    ]
