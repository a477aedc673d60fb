"""Gate records: what was run on a variant, on which machine, and how it went.

A record is a JSON file beside the variant, `build/<variant>.gate-<torch>.json`. Nothing but the
standard library is needed here: GPU machines bring their own Python.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from .built import BuiltVariant
from .errors import BuildError

# What a variant must pass. The names are those of the checks in a record.
SUITES = {
    "gqa backward": "tests/attention/test_gqa_backward.py",
    "norms": "tests/norms",
}
REQUIRED = ("load", "api", "opcheck", *SUITES)
# What it must pass if it has the function.
SUITES_OF_FUNCTIONS = {
    "flash_attn_with_kvcache": ("kv cache", "tests/attention/test_kvcache.py"),
}
# ... and if that function has the parameter.
SUITES_OF_PARAMETERS = {
    ("flash_attn_with_kvcache", "k_descale"): (
        "float8 cache",
        "tests/attention/test_kvcache_float8.py",
    ),
}


def suites(api: dict) -> dict[str, str]:
    """The test suites of a variant with this surface."""
    more = [suite for name, suite in SUITES_OF_FUNCTIONS.items() if name in api.get("all", [])]
    parameters = api.get("functions", {})
    more += [
        suite
        for (name, parameter), suite in SUITES_OF_PARAMETERS.items()
        if f" {parameter}=" in parameters.get(name, "")
    ]
    return {**SUITES, **dict(more)}


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    seconds: float
    detail: str = ""  # counts of a test suite, or what went wrong


@dataclass(frozen=True)
class GateRecord:
    variant: str
    digest: str  # sha256 of the variant's metadata.json, which holds those of its files
    library: str
    library_sha256: str
    commit: str | None
    device: str  # such as "NVIDIA H200" or the processor's name
    capability: str | None  # of a CUDA device, such as "9.0"
    torch: str
    torch_cuda: str | None
    python: str
    kernels: str
    loaded_through: str  # get_kernel or get_local_kernel
    why_local: str  # the loader's reason for not offering the variant to this torch, if any
    command: str
    date: str  # ISO 8601, UTC
    checks: list[Check]
    api: dict = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        by_name = {check.name: check.passed for check in self.checks}
        return all(by_name.get(name, False) for name in self.required) and all(by_name.values())

    @property
    def required(self) -> list[str]:
        """The checks without which it has not passed."""
        return [*REQUIRED, *(name for name in suites(self.api) if name not in SUITES)]

    def summary(self) -> str:
        """One line for tables and diffs."""
        where = f"{self.device}, torch {self.torch}"
        failed = [check.name for check in self.checks if not check.passed]
        failed += [n for n in self.required if n not in {check.name for check in self.checks}]
        return f"failed ({', '.join(failed)}) on {where}" if failed else f"passed on {where}"

    def to_dict(self) -> dict:
        return {**asdict(self), "passed": self.passed}


def record_path(variant: BuiltVariant, torch_version: str) -> Path:
    return variant.folder.with_name(f"{variant.name}.gate-{torch_version}.json")


def write_record(path: Path, record: GateRecord) -> None:
    """All of it or nothing: a killed gate leaves no half record."""
    incoming = path.with_name(f".{path.name}.incoming")
    try:
        incoming.write_text(json.dumps(record.to_dict(), indent=2) + "\n")
        incoming.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            incoming.unlink()
        raise BuildError(f"{path}: {error}") from None


def read_record(path: Path) -> GateRecord:
    try:
        data = json.loads(path.read_text())
        known = {entry.name for entry in fields(GateRecord)}
        values = {key: value for key, value in data.items() if key in known}
        return GateRecord(**{**values, "checks": [Check(**c) for c in values["checks"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise BuildError(f"{path}: no gate record: {error}") from None


def read_records(variant: BuiltVariant) -> tuple[list[GateRecord], list[str]]:
    """The records of exactly these files, and why others beside the variant do not count."""
    records, foreign = [], []
    folder = variant.folder.parent
    for path in sorted(folder.glob(f"{variant.name}.gate-*.json")):
        record = read_record(path)
        if record.variant == variant.name and record.digest == variant.digest:
            records.append(record)
        else:
            foreign.append(f"{path.name} is of another build of it")
    return records, foreign
