"""Runs the gate of one variant and writes its record beside it: python -m tools.gate VARIANT.

In fresh processes, through `kernels.get_kernel` from a branch of a Hub on this machine: load, API
surface, opcheck, the GQA backward suite and the norms suite (and the key-value cache's, once a
variant has that), on the device that the variant is for.
A variant that this machine's torch would not be offered is loaded from its folder instead, and the
record says why.

Runs on any Python that has torch, kernels, transformers and pytest: GPU machines bring their own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# The Hub of the gate is on this machine, has no Xet storage and needs no token of the user's;
# huggingface_hub reads these when it is imported.
os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from .built import BuiltVariant, differences, read_variant
from .errors import BuildError
from .gate_record import Check, GateRecord, record_path, suites, write_record
from .release_target import HubTarget, Move

ROOT = Path(__file__).resolve().parent.parent
_BRANCH = "staging"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("variant", help="a name in build/, or a variant's folder")
    parser.add_argument("--build-dir", type=Path, help="folder of the variants, default build/")
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="run up to N test suites at a time (default 1; a GPU machine has cores for more)",
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.parallel < 1:
        parser.error(f"--parallel must be at least 1, was {options.parallel}")
    try:
        folder = (options.build_dir or options.root / "build") / options.variant
        variant = read_variant(folder if folder.is_dir() else Path(options.variant))
        command = f"python -m tools.gate {shlex.join(sys.argv[1:])}"
        record = run_gate(variant, options.root.resolve(), command, options.parallel)
        path = record_path(variant, record.torch)
        write_record(path, record)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{variant.name}: {record.summary()}\n{path}")
    return 0 if record.passed else 1


def run_gate(variant: BuiltVariant, root: Path, command: str, parallel: int = 1) -> GateRecord:
    """Runs every check of the gate, in fresh processes, and returns the record, passed or not.

    Up to `parallel` test suites run at a time; the record has them in the same order.

    Raises:
        BuildError: the gate cannot run here, or the files are not those that were built.
    """
    found = differences(variant)
    if found:
        raise BuildError(f"{variant.name} is not as it was built: {'; '.join(found)}")
    device = variant.backend
    why_local = _not_offered(variant, device)
    repo_id = _repo_id(root, variant)
    with tempfile.TemporaryDirectory(prefix="gate-") as scratch:
        folder = Path(scratch)
        with _where(variant, root, folder, repo_id, why_local) as settings:
            environment = _environment(folder, settings)
            looked = _look(folder, root, environment, repo_id, device)
            checks = [Check(**check) for check in looked["checks"]]
            if all(check.passed for check in checks):

                def run_suite(named: tuple[str, str]) -> Check:
                    return _run_suite(*named, root, folder, environment, device)

                with ThreadPoolExecutor(parallel) as pool:
                    checks += pool.map(run_suite, suites(looked["api"]).items())
    return GateRecord(
        variant=variant.name,
        digest=variant.digest,
        library=variant.library.name,
        library_sha256=variant.library_sha256,
        commit=variant.commit,
        loaded_through="get_local_kernel" if why_local else "get_kernel",
        why_local=why_local,
        command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        checks=checks,
        api=looked["api"],
        **looked["machine"],
    )


def _not_offered(variant: BuiltVariant, device: str) -> str:
    """The loader's reason for not giving this variant to this torch; empty when it does."""
    import torch
    from kernels.variants import parse_variant, resolve_variant, variants_trace_str

    if device == "cuda" and not torch.cuda.is_available():
        raise BuildError(
            f"{variant.name}: its gate needs a GPU and a CUDA build of torch; torch "
            f"{torch.__version__} sees none"
        )
    best, trace = resolve_variant([parse_variant(variant.name)])
    if best is not None:
        return ""
    return re.sub(r"\s+", " ", variants_trace_str(trace)).strip()


def _repo_id(root: Path, variant: BuiltVariant) -> str:
    general = tomllib.loads((root / "build.toml").read_text())["general"]
    return general.get("hub", {}).get("repo-id") or f"org/{variant.metadata['name']}"


@contextmanager
def _where(
    variant: BuiltVariant, root: Path, folder: Path, repo_id: str, why_local: str
) -> Iterator[dict[str, str]]:
    """The settings under which the loader finds the variant, and nothing else."""
    if why_local:
        # What get_local_kernel does with a variant's folder, for code that calls get_kernel.
        local = {"LOCAL_KERNELS": f"{repo_id}={variant.folder.resolve()}", "HF_HUB_OFFLINE": "1"}
        yield local
        return
    with _staging_hub(root, folder, repo_id.split("/")[0]) as settings:
        target = HubTarget(repo_id, endpoint=settings["HF_ENDPOINT"])
        target.create_repository()
        files = {f"build/{variant.name}/{name}": path for name, path in variant.files().items()}
        target.move(Move(_BRANCH, f"Stage {variant.name}", files, [], None))
        yield {
            **settings,
            "HF_HUB_OFFLINE": "0",
            "KERNEL_REVISION": _BRANCH,
            # Names no kernel that anybody loads: the tests' own default would be this checkout.
            "LOCAL_KERNELS": f"none/none={folder}",
        }


@contextmanager
def _staging_hub(root: Path, folder: Path, publisher: str) -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "loopback_hub", str(folder / "hub"), "--trusted", publisher]
    command.append("--until-eof")  # of the pipe below, which closes however this process ends
    environment = {**os.environ, "PYTHONPATH": str(root / "tests")}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            lines = [server.stdout.readline() for _ in range(2)]
            settings = dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))
            if "HF_ENDPOINT" not in settings:
                raise BuildError("the Hub of the gate did not start")
            yield settings
        finally:
            server.terminate()


def _environment(folder: Path, settings: dict[str, str]) -> dict[str, str]:
    """This process's, with a cold cache and no settings of the user's own Hub."""
    dropped = ("HF_TOKEN", "HF_ENDPOINT", "KERNELS_CACHE", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
    base = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**base, "HF_HOME": str(folder / "cache"), **settings}


def _look(folder: Path, root: Path, environment: dict[str, str], repo_id: str, device: str) -> dict:
    out = folder / "checks.json"
    command = [sys.executable, "-m", "tools.gate_checks", "--repo-id", repo_id]
    command += ["--revision", _BRANCH, "--device", device, "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, env=environment)
    if not out.is_file():
        raise BuildError(
            f"the process that loads the variant ended with status {result.returncode} and no "
            "result; what it said is above"
        )
    return json.loads(out.read_text())


def _run_suite(
    name: str, suite: str, root: Path, folder: Path, environment: dict[str, str], device: str
) -> Check:
    """One pytest run. A suite in which nothing ran has not passed."""
    report = folder / f"{name.replace(' ', '-')}.xml"
    marker = "gpu" if device == "cuda" else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", suite]
    start = time.monotonic()
    result = subprocess.run(command, cwd=root, env=environment)
    seconds = round(time.monotonic() - start, 1)
    counts = _counts(report)
    passed = result.returncode == 0 and counts.get("passed", 0) > 0
    detail = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    print(f"gate: {name}: {detail or 'nothing ran'} ({seconds} s)", flush=True)
    return Check(name, passed, seconds, detail or f"nothing ran, status {result.returncode}")


def _counts(report: Path) -> dict[str, int]:
    if not report.is_file():
        return {}
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {
        what: sum(int(suite.get(what, 0)) for suite in suites)
        for what in ("tests", "failures", "errors", "skipped")
    }
    total = counts.pop("tests")
    return {"passed": total - sum(counts.values()), **counts}


if __name__ == "__main__":
    sys.exit(main())
