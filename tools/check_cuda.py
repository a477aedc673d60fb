"""Checks of compiled CUDA code: embedded architectures, register spills, ptxas's advice."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .archs import Arch
from .errors import BuildError
from .ninja_file import BuildPlan, CompileStep
from .symbols import demangle


class AllowedSpill(BaseModel):
    """One entry of spills.toml: a register spill that was measured and found worth it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kernel: str  # demangled, without its parameters
    cuda: str  # compiler version, major.minor
    arch: str  # such as 9.0a
    bytes: int = Field(gt=0)  # stores and loads together
    reason: str = Field(min_length=10)


@dataclass(frozen=True)
class KernelFigures:
    """What ptxas printed of one kernel for one architecture."""

    kernel: str  # demangled, without its parameters
    arch: str
    registers: int
    spill_bytes: int


_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_ADVICE = re.compile(r"\bC75\d\d\b")


def read_allowed_spills(path: Path) -> list[AllowedSpill]:
    """The entries of a spills.toml; none when there is no such file."""
    if not path.is_file():
        return []
    try:
        entries = tomllib.loads(path.read_text()).get("spill", [])
        return [AllowedSpill.model_validate(entry) for entry in entries]
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise BuildError(f"{path}: {error}") from None


def check_cuda(plan: BuildPlan, cuobjdump: Path, allowed: list[AllowedSpill]) -> list[str]:
    """What is wrong with the CUDA objects; empty when nothing is."""
    problems = []
    figures = []
    for step in plan.steps:
        if step.is_cuda:
            log = step.log.read_text()
            figures += read_figures(log)
            problems += [f"{step.source}: {line}" for line in _lines_with(_ADVICE, log)]
            problems += _check_archs(step, cuobjdump)
    built = {arch.without_ptx for step in plan.steps for arch in step.archs}
    relevant = [
        entry
        for entry in allowed
        if entry.cuda == plan.toolkit.version and Arch.parse(entry.arch) in built
    ]
    return problems + compare_spills(figures, relevant)


def warnings_of(plan: BuildPlan) -> list[str]:
    """nvcc's and ptxas's warnings, which went to files while compiling."""
    return [
        f"{step.source}: {line}"
        for step in plan.steps
        if step.is_cuda
        for line in _lines_with(re.compile(r"\bwarning\b", re.IGNORECASE), step.log.read_text())
    ]


def _lines_with(pattern: re.Pattern, text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if pattern.search(line)]


def read_figures(log: str) -> list[KernelFigures]:
    """Parses what `-Xptxas=-v` prints."""
    parts = _ENTRY.split(log)[1:]
    found = []
    for mangled, digits, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        spill = _SPILL.search(text)
        registers = _REGISTERS.search(text)
        found.append(
            (
                mangled,
                _arch_of(digits),
                int(registers[1]) if registers else 0,
                int(spill[1]) + int(spill[2]) if spill else 0,
            )
        )
    names = demangle([entry[0] for entry in found], parameters=False)
    return [KernelFigures(name, *entry[1:]) for name, entry in zip(names, found, strict=True)]


def _arch_of(digits: str) -> str:
    """90a -> 9.0a, 120 -> 12.0."""
    match = re.fullmatch(r"(\d+)(\d)([af]?)", digits)
    return f"{match[1]}.{match[2]}{match[3]}"


def compare_spills(figures: list[KernelFigures], allowed: list[AllowedSpill]) -> list[str]:
    """Every spill must be listed with its very size, and every listed one must be there."""
    measured: dict[tuple[str, str], int] = {}
    for figure in figures:
        key = (figure.kernel, figure.arch)
        measured[key] = max(measured.get(key, 0), figure.spill_bytes)
    listed = {(entry.kernel, entry.arch): entry.bytes for entry in allowed}
    problems = []
    for (kernel, arch), size in sorted(measured.items()):
        expected = listed.get((kernel, arch), 0)
        if size > expected:
            problems.append(f"{kernel} for {arch} spills {size} bytes, allowed: {expected}")
    for (kernel, arch), size in sorted(listed.items()):
        if measured.get((kernel, arch), 0) < size:
            now = measured.get((kernel, arch))
            state = "no such kernel" if now is None else f"{now} bytes now"
            problems.append(f"spills.toml allows {kernel} for {arch} {size} bytes, but: {state}")
    return problems


def _check_archs(step: CompileStep, cuobjdump: Path) -> list[str]:
    expected = {str(arch.without_ptx) for arch in step.archs}
    expected |= {f"PTX {arch.without_ptx}" for arch in step.archs if arch.ptx}
    embedded = embedded_archs(step.object, cuobjdump)
    if embedded == expected:
        return []
    return [
        f"{step.source} embeds {', '.join(sorted(embedded)) or 'no code'}, "
        f"build.toml asks for {', '.join(sorted(expected))}"
    ]


def embedded_archs(path: Path, cuobjdump: Path) -> set[str]:
    """Such as {"8.0", "9.0a", "PTX 8.0"}."""
    found = set()
    for option, prefix in (("--list-elf", ""), ("--list-ptx", "PTX ")):
        result = subprocess.run([str(cuobjdump), option, str(path)], capture_output=True, text=True)
        found |= {
            f"{prefix}{_arch_of(digits)}" for digits in re.findall(r"\.sm_(\w+)\.", result.stdout)
        }
    return found
