"""The tables in docs/ are those that the records give."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def report(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.report", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_tables_of_the_documents():
    documents = [(ROOT / "docs" / name).read_text() for name in ("performance.md", "norms.md")]
    tables = report("--tables-only").strip().split("\n\n")
    assert len(tables) >= 6
    for table in tables:
        missing = [line for line in table.splitlines() if f"{line}\n" not in "".join(documents)]
        assert not missing, "run python -m benchmarks.report and put its tables into docs/"


@pytest.mark.parametrize("arguments", [["--help"], ["--tables-only"]])
def test_draws_nothing_unasked(arguments, tmp_path):
    report(*arguments, "--plots", tmp_path)
    assert not list(tmp_path.iterdir())


def test_draws_the_plots(tmp_path):
    report("--plots", tmp_path)
    names = ["attention_cuda.png", "norms_cuda.png", "training_cuda.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
