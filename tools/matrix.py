"""Builds every variant that build.toml asks for, from one clean commit: python -m tools.matrix.

    python -m tools.matrix                     HEAD, whose working tree must be clean, into build/
    python -m tools.matrix --commit COMMIT     any commit, in a git worktree, into dist/<commit>/

What is finished is not built again: a run that was stopped goes on where it was. The table at the
end has a line for each variant; the exit status tells whether all of them stand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from . import clang_gate
from .build import default_jobs
from .build_toml import BuildToml, read_build_toml
from .built import differences, read_variant
from .cuda_toolkit import pypi_versions
from .errors import BuildError
from .git import git, source_state
from .offered import in_cuda_range
from .variant import variant_name

ROOT = Path(__file__).resolve().parent.parent
_STATE = "matrix.json"
_CLANG_ROW = f"CUDA {clang_gate.VERSION} (clang, compiled only)"


@dataclass
class Row:
    """One line of the table."""

    name: str
    state: str  # built, as before, failed, not run
    archs: str = ""
    bytes: int = 0
    seconds: float = 0.0
    checks: str = ""
    digest: str = ""  # of the variant's metadata.json: whether it is still the one that was built


@dataclass(frozen=True)
class Source:
    """Where the commit's files are."""

    root: Path
    commit: str
    out: Path  # folder of the variants
    objects: Path


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        source = _in_place(options) if options.commit is None else _in_worktree(options)
        rows = build_matrix(source, options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(format_table(rows, source.commit))
    failed = [row for row in rows if row.state == "failed"]
    if options.commit is not None and not failed:
        git(options.root, "worktree", "remove", "--force", str(source.root))
    if failed:
        print(f"error: failed: {', '.join(row.name for row in failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--commit", help="build this commit instead of HEAD")
    parser.add_argument(
        "--only",
        metavar="WHAT",
        action="append",
        help="cpu, a CUDA version such as 13.0, or 12.6 for the compile gate; may be repeated",
    )
    parser.add_argument("--jobs", type=int, help="compilers at a time; default by cores and memory")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.root = options.root.resolve()
    return options


def _in_place(options: argparse.Namespace) -> Source:
    root = options.root
    commit, is_dirty = source_state(root)
    if commit is None:
        raise BuildError(f"{root}: no commit there; the variants of a matrix come from one")
    if is_dirty:
        changed = git(root, "status", "--porcelain") or ""
        raise BuildError(
            f"the working tree differs from the commit ({', '.join(changed.split()[1::2][:5])}); "
            "commit first, or build the last commit with COMMIT=HEAD"
        )
    return Source(root, commit, root / "build", root / ".build")


def _in_worktree(options: argparse.Namespace) -> Source:
    """The commit checked out beside the objects; today's tools build it."""
    root = options.root
    commit = git(root, "rev-parse", "--verify", f"{options.commit}^{{commit}}")
    if commit is None:
        raise BuildError(f"COMMIT={options.commit}: git knows no such commit")
    folder = root / ".build" / "worktrees" / commit[:12]
    git(root, "worktree", "prune")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = ["git", "-C", str(root), "worktree", "add", "--detach", str(folder), commit]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"git worktree: {result.stderr.strip()}")
    objects = root / ".build" / f"commit-{commit[:12]}"
    return Source(folder, commit, root / "dist" / commit[:12], objects)


def build_matrix(source: Source, options: argparse.Namespace) -> list[Row]:
    """Builds what is missing, several variants at a time where the machine has room for that."""
    config = read_build_toml(source.root)
    wanted = _wanted(config, options.only)
    state = _State(source.out / _STATE)
    jobs = options.jobs or default_jobs()
    at_once = max(1, min(len(wanted), jobs // 16))
    print(f"{len(wanted)} variants of {source.commit[:12]}, {jobs} compilers at a time", flush=True)
    toolkits = options.root / ".toolkit"

    def build(numbered: tuple[int, tuple[str, str | None]]) -> Row:
        number, (backend, cuda_version) = numbered
        name = variant_name(config, backend, cuda_version)
        before = _still_there(state.rows.get(name), source)
        if before is not None:
            return before
        print(f"[{number}/{len(wanted)}] {name}", flush=True)
        command = [sys.executable, "-m", "tools.build", "--backend", backend]
        command += ["--cuda", cuda_version] if cuda_version is not None else []
        command += ["--root", str(source.root), "--out", str(source.out)]
        command += ["--build-dir", str(source.objects), "--toolkit-dir", str(toolkits)]
        command += ["--jobs", str(max(1, jobs // at_once))]
        prefix = f"{name}: " if at_once > 1 else ""
        row = _run(command, name, prefix, source)
        state.add(row)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(build, enumerate(wanted, 1)))
    if clang_gate.is_wanted(config) and (not options.only or clang_gate.VERSION in options.only):
        rows.append(_clang_row(config, source, toolkits, jobs))
    return rows


def _wanted(config: BuildToml, only: list[str] | None) -> list[tuple[str, str | None]]:
    everything: list[tuple[str, str | None]] = []
    if "cpu" in config.general.backends:
        everything.append(("cpu", None))
    if "cuda" in config.general.backends:
        everything += [("cuda", v) for v in pypi_versions() if in_cuda_range(config, v)]
    names = [version or backend for backend, version in everything]
    if clang_gate.is_wanted(config):
        names.append(clang_gate.VERSION)
    for name in only or []:
        if name not in names:
            raise BuildError(f"--only {name}: build.toml and PyPI give {', '.join(names)}")
    return [
        entry for entry, name in zip(everything, names, strict=False) if not only or name in only
    ]


def _still_there(row: Row | None, source: Source) -> Row | None:
    """The row of an earlier run, when its variant is still what was built then, of this commit."""
    if row is None or row.state == "failed":
        return None
    try:
        variant = read_variant(source.out / row.name)
    except BuildError:
        return None
    is_same = variant.digest == row.digest and variant.commit == source.commit
    if not is_same or variant.is_dirty or differences(variant):
        return None
    row.state = "as before"
    return row


def _run(command: list[str], name: str, prefix: str, source: Source) -> Row:
    """Runs one build, passing on what it says."""
    start = time.monotonic()
    checks = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(f"{prefix}{line}", end="", flush=True)
            if line.startswith("checked: "):
                checks = line.removeprefix("checked: ").strip()
    seconds = time.monotonic() - start
    if process.returncode != 0:
        return Row(name, "failed", seconds=seconds, checks="the messages are above")
    variant = read_variant(source.out / name)
    size = variant.library.stat().st_size
    archs = " ".join(variant.archs)
    return Row(name, "built", archs, size, seconds, checks, variant.digest)


def _clang_row(config: BuildToml, source: Source, toolkits: Path, jobs: int) -> Row:
    reason = clang_gate.why_not_here()
    if reason:
        return Row(_CLANG_ROW, "not run", checks=reason)
    print(_CLANG_ROW, flush=True)
    start = time.monotonic()
    try:
        build_dir = source.objects / "clang-cu126"
        archs = clang_gate.compile_all(config, source.root, build_dir, toolkits, jobs)
    except BuildError as error:
        return Row(_CLANG_ROW, "failed", seconds=time.monotonic() - start, checks=str(error))
    seconds = time.monotonic() - start
    size = (build_dir / "library.so").stat().st_size
    return Row(_CLANG_ROW, "compiled", " ".join(archs), size, seconds, "links to libcudart.so.12")


class _State:
    """What earlier runs have finished, in a file beside the variants."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.rows: dict[str, Row] = {}
        if path.is_file():
            try:
                entries = json.loads(path.read_text())
                self.rows = {entry["name"]: Row(**entry) for entry in entries}
            except (ValueError, TypeError, KeyError):
                pass  # of another version of this tool: everything is built again

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows[row.name] = row
            self._path.parent.mkdir(parents=True, exist_ok=True)
            incoming = self._path.with_name(f".{_STATE}.{os.getpid()}")
            incoming.write_text(json.dumps([asdict(r) for r in self.rows.values()], indent=2))
            incoming.replace(self._path)


def format_table(rows: list[Row], commit: str) -> str:
    header = ("variant", "state", "architectures", "MB", "seconds", "checks")
    lines = [
        (
            row.name,
            row.state,
            row.archs or "-",
            f"{row.bytes / 1e6:.2f}" if row.bytes else "-",
            f"{row.seconds:.0f}" if row.seconds else "-",
            row.checks,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *lines]
    )
    return f"\ncommit {commit}\n{text}"


if __name__ == "__main__":
    sys.exit(main())
