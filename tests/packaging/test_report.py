"""The tables in docs/ are those that the records give."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import curves, report_models, report_two_gpus

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
    names = ("performance.md", "norms.md", "attention_sm90.md", "cpu_attention.md")
    documents = [(ROOT / "docs" / name).read_text() for name in names]
    tables = report("--tables-only").strip().split("\n\n")
    assert len(tables) >= 14
    for table in tables:
        missing = [line for line in table.splitlines() if f"{line}\n" not in "".join(documents)]
        assert not missing, "run python -m benchmarks.report and put its tables into docs/"


def test_tables_of_two_gpus():
    document = (ROOT / "docs" / "distributed.md").read_text()
    for table in report_two_gpus.tables():
        assert f"{table}\n\n" in document


@pytest.mark.parametrize("arguments", [["--help"], ["--tables-only"]])
def test_draws_nothing_unasked(arguments, tmp_path):
    report(*arguments, "--plots", tmp_path)
    assert not list(tmp_path.iterdir())


def test_draws_the_plots(tmp_path):
    report("--plots", tmp_path)
    names = ["attention_cuda.png", "norms_cuda.png", "training_cuda.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_writes_whole_models_tables_behind_their_marks(tmp_path, monkeypatch):
    record = {
        "figures": [
            {
                "way": "dynamic",
                "attention": "ours",
                "dtype": "bfloat16",
                "fault": None,
                "tokens_per_s": 7,
                "share_of_float32": 1.0,
                "answers_of_float32": 0.5,
                "share_covered": 0.99,
                "wrong": 0,
            }
        ]
    }
    (tmp_path / "generation_cuda.json").write_text(json.dumps(record))
    monkeypatch.setattr(report_models, "RESULTS", tmp_path)
    document = tmp_path / "page.md"
    document.write_text((ROOT / "docs" / "performance.md").read_text())
    for _ in range(2):  # the second time it takes the place of the first
        report_models.write_tables(document, report_models.tables())
        written = document.read_text()
        assert written.count(report_models.tables()["generation"]) == 1
        assert f"{report_models.tables()['generation']}\n\nHow to read" in written


def test_losses_within_torchs_runs():
    losses = {"torch": [3.0, 2.0], "torch_cudnn": [3.1, 2.1], "ours": [3.05, 2.3]}
    figure = curves.envelope_figure("ours", losses)
    assert figure["share_of_steps"] == 0.5  # step 2 lies 0.2 from the closest, torch's 0.1 apart
    assert figure["largest_over_allowed"] == pytest.approx(2.0)
