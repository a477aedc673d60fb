"""Typed reader of build.toml.

kernel-builder reads the same file; this reader knows the subset of edition 5 that a CPU and CUDA
project of ours needs and refuses everything else, naming file, key and reason. The loader's own
parser (`kernels._rust.Build`) has the last word, so the two doors to a build cannot drift apart.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from .archs import Arch
from .errors import BuildError

Version = Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
KernelName = Annotated[str, StringConstraints(pattern=r"^[a-z][-a-z0-9]*[a-z0-9]$")]
SectionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


def _inside_project(path: str) -> str:
    if path.startswith("/") or ".." in Path(path).parts:
        raise ValueError("must be a path inside the project")
    return path


SourcePath = Annotated[str, AfterValidator(_inside_project)]

COMPILED = (".cpp", ".cu")
HEADERS = (".h", ".cuh")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=_kebab)


class CudaRange(_Table):
    minver: Version | None = None
    maxver: Version | None = None


class Hub(_Table):
    repo_id: str | None = None
    branch: str | None = None


class General(_Table):
    name: KernelName
    version: int = Field(ge=1)
    edition: Literal[5]
    license: str
    backends: list[Literal["cpu", "cuda"]] = Field(min_length=1)
    source: str | None = None
    upstream: str | None = None
    python_depends: list[str] = []
    cuda: CudaRange = CudaRange()
    hub: Hub = Hub()

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")


class StableAbi(_Table):
    cpu: Version | None = None
    cuda: Version | None = None


class Torch(_Table):
    src: list[SourcePath] = Field(min_length=1)
    include: list[SourcePath] = []
    pyext: list[str] = ["py"]
    cxx_flags: list[str] = []
    stable_abi: StableAbi


class Kernel(_Table):
    """One `[kernel.*]` section: sources that share a backend, flags and CUDA capabilities."""

    backend: Literal["cpu", "cuda"]
    depends: list[Literal["torch"]]
    src: list[SourcePath] = Field(min_length=1)
    include: list[SourcePath] = []
    cxx_flags: list[str] = []
    cuda_flags: list[str] = []
    cuda_minver: Version | None = None
    cuda_capabilities: list[str] = []


class BuildToml(_Table):
    general: General
    torch: Torch
    kernel: dict[SectionName, Kernel] = {}

    def kernels_for(self, backend: str) -> dict[str, Kernel]:
        return {name: kernel for name, kernel in self.kernel.items() if kernel.backend == backend}


def read_build_toml(root: Path) -> BuildToml:
    """Reads `root`/build.toml.

    Raises:
        BuildError: naming file, key and reason.
    """
    path = root / "build.toml"
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path}: {error}") from None
    try:
        config = BuildToml.model_validate(data)
    except ValidationError as error:
        raise BuildError("\n".join(_explain(path, entry) for entry in error.errors())) from None
    _check_consistency(path, root, config)
    _check_with_loader(path, root)
    return config


def _explain(path: Path, entry: dict) -> str:
    key = ".".join(str(part) for part in entry["loc"])
    reason = "unknown key" if entry["type"] == "extra_forbidden" else entry["msg"]
    got = "" if entry["type"] == "missing" else f" (got {entry['input']!r})"
    return f"{path}: {key}: {reason}{got}"


def _check_consistency(path: Path, root: Path, config: BuildToml) -> None:
    """What single values cannot show: files, sections and backends that must fit together."""
    problems = [
        f"{section}.src: no such file: {source}"
        for section, sources in _all_sources(config)
        for source in sources
        if not (root / source).is_file()
    ]
    problems += [
        f"{section}.src: {source} is neither compiled ({', '.join(COMPILED)}) nor a header"
        for section, sources in _all_sources(config)
        for source in sources
        if not source.endswith(COMPILED + HEADERS)
    ]
    for backend in config.general.backends:
        if getattr(config.torch.stable_abi, backend) is None:
            problems.append(f"torch.stable-abi.{backend}: missing, but general.backends names it")
        problems += _listed_twice(config, backend)
    for name, kernel in config.kernel.items():
        problems += [f"kernel.{name}.{problem}" for problem in _kernel_problems(config, kernel)]
    if problems:
        raise BuildError("\n".join(f"{path}: {problem}" for problem in problems))


def _all_sources(config: BuildToml) -> list[tuple[str, list[str]]]:
    kernels = [(f"kernel.{name}", kernel.src) for name, kernel in config.kernel.items()]
    return [("torch", config.torch.src), *kernels]


def _listed_twice(config: BuildToml, backend: str) -> list[str]:
    """kernel-builder sets flags per file, so within one backend a file belongs to one section."""
    first: dict[str, str] = dict.fromkeys(config.torch.src, "torch")
    problems = []
    for name, kernel in config.kernels_for(backend).items():
        for source in kernel.src:
            if source.endswith(COMPILED) and source in first:
                problems.append(f"kernel.{name}.src: {source} is already listed in {first[source]}")
            first[source] = f"kernel.{name}"
    return problems


def _kernel_problems(config: BuildToml, kernel: Kernel) -> list[str]:
    problems = []
    if kernel.backend not in config.general.backends:
        problems.append(f"backend: {kernel.backend!r} is not in general.backends")
    has_cuda_source = any(source.endswith(".cu") for source in kernel.src)
    cuda_keys = {
        "cuda-capabilities": kernel.cuda_capabilities,
        "cuda-flags": kernel.cuda_flags,
        "cuda-minver": kernel.cuda_minver,
    }
    if kernel.backend != "cuda":
        problems += [f"{key}: only for backend cuda" for key, value in cuda_keys.items() if value]
        if has_cuda_source:
            problems.append("src: a .cu file in a section of backend cpu")
    elif has_cuda_source and not kernel.cuda_capabilities:
        problems.append("cuda-capabilities: missing, but src has .cu files")
    for text in kernel.cuda_capabilities:
        try:
            Arch.parse(text)
        except ValueError as error:
            problems.append(f"cuda-capabilities: {error}")
    return problems


def _check_with_loader(path: Path, root: Path) -> None:
    from kernels._rust import Build

    try:
        Build.open(root)
    except Exception as error:  # the binding raises several types, all with a readable text
        reason = re.sub(r"\s*\n\s*", " ", str(error))
        raise BuildError(f"{path}: refused by kernels {_kernels_version()}: {reason}") from None


def _kernels_version() -> str:
    from importlib.metadata import version

    return version("kernels")
