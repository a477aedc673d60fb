"""Writes build.ninja for one variant."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from ninja.ninja_syntax import Writer

from .archs import Arch
from .build_toml import BuildToml
from .cuda_toolkit import CudaToolkit
from .errors import BuildError

_COMMON_FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
# -fno-gnu-unique: static locals of inline functions must not be merged between two kernels that one
# process loads.
_CXX_FLAGS = [*_COMMON_FLAGS, "-fno-gnu-unique", "-Wall", "-Wextra", "-Wno-unused-parameter"]
_CUDA_FLAGS = [
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-gnu-unique",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xptxas=-v",
]


@dataclass(frozen=True)
class CompileStep:
    source: str  # relative to the root
    object: Path
    kernel: str | None  # its section, None for [torch]
    flags: list[str] = field(default_factory=list)
    archs: list[Arch] = field(default_factory=list)  # of a .cu file

    @property
    def is_cuda(self) -> bool:
        return self.source.endswith(".cu")

    @property
    def log(self) -> Path:
        """What nvcc and ptxas said, kept for the checks."""
        return self.object.with_suffix(".log")


@dataclass(frozen=True)
class BuildPlan:
    steps: list[CompileStep]
    library: Path
    link_flags: list[str]
    toolkit: CudaToolkit | None


def torch_folder() -> Path:
    """Where torch lies, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed in this Python; its headers are needed")
    return Path(spec.origin).parent


def cxx_standard() -> str:
    """As kernel-builder chooses it. The sources are valid in both."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return "c++20" if (int(major), int(minor)) >= (2, 12) else "c++17"


def make_plan(
    config: BuildToml,
    root: Path,
    build_dir: Path,
    *,
    backend: str,
    archs: dict[str, list[Arch]],
    toolkit: CudaToolkit | None,
) -> BuildPlan:
    """What to compile and how. `archs` has the CUDA architectures of each section."""
    defines = ["-DCPU_KERNEL"] if backend == "cpu" else ["-DCUDA_KERNEL", "-DUSE_CUDA=1"]
    steps = _torch_steps(config, root, build_dir, backend, defines, toolkit)
    for name, kernel in config.kernels_for(backend).items():
        includes = [f"-I{root / folder}" for folder in kernel.include]
        for source in kernel.src:
            target = build_dir / "objects" / name / f"{source}.o"
            if source.endswith(".cpp"):
                flags = [*_CXX_FLAGS, f"-std={cxx_standard()}", *defines, *includes]
                flags += _cuda_include(toolkit) + kernel.cxx_flags
                steps.append(CompileStep(source, target, name, flags))
            elif source.endswith(".cu"):
                gencode = [flag for arch in archs[name] for flag in arch.gencode_flags()]
                flags = [*_cuda_flags(toolkit), f"-std={cxx_standard()}", *defines, *includes]
                flags += gencode + kernel.cuda_flags
                steps.append(CompileStep(source, target, name, flags, archs[name]))
    return BuildPlan(steps, build_dir / "library.so", _link_flags(toolkit), toolkit)


def _torch_steps(
    config: BuildToml,
    root: Path,
    build_dir: Path,
    backend: str,
    defines: list[str],
    toolkit: CudaToolkit | None,
) -> list[CompileStep]:
    """The files of [torch]: they alone see torch's and Python's headers."""
    major, minor = getattr(config.torch.stable_abi, backend).split(".")
    target_version = (int(major) << 56) | (int(minor) << 48)
    torch_include = torch_folder() / "include"
    flags = [*_CXX_FLAGS, f"-std={cxx_standard()}", *defines]
    flags += ["-DPy_LIMITED_API=3", f"-DTORCH_TARGET_VERSION={target_version:#x}"]
    flags += [f"-I{root / folder}" for folder in config.torch.include]
    flags += [f"-I{build_dir / 'generated'}", f"-isystem{torch_include}"]
    flags += [f"-isystem{torch_include / 'torch/csrc/api/include'}"]
    flags += [f"-isystem{sysconfig.get_paths()['include']}"]
    flags += _cuda_include(toolkit) + config.torch.cxx_flags
    return [
        CompileStep(source, build_dir / "objects" / "torch" / f"{source}.o", None, flags)
        for source in config.torch.src
        if source.endswith(".cpp")
    ]


def _cuda_flags(toolkit: CudaToolkit) -> list[str]:
    """Device code compressed for size is a quarter as large; the driver unpacks it on first use."""
    compresses = tuple(int(part) for part in toolkit.version.split(".")) >= (12, 8)
    return [*_CUDA_FLAGS, *(["--compress-mode=size"] if compresses else [])]


def _cuda_include(toolkit: CudaToolkit | None) -> list[str]:
    return [] if toolkit is None else [f"-isystem{toolkit.include_dir}"]


def _link_flags(toolkit: CudaToolkit | None) -> list[str]:
    """torch before libstdc++, whose newer symbols libc10 exports without a version.

    libtorch.so must be among the dependencies although no symbol of a CPU torch's is used: on a
    CUDA torch it is what brings the current stream.
    """
    flags = ["-shared", "-Wl,--strip-all", "-Wl,--gc-sections", f"-L{torch_folder() / 'lib'}"]
    flags += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"]
    if toolkit is not None:
        flags += [f"-L{toolkit.library_dir}", f"-l:{toolkit.runtime_name}"]
    return flags


def write_ninja_file(path: Path, plan: BuildPlan) -> None:
    """For a ninja that runs in the project's root: messages name the files as build.toml does."""
    with path.open("w") as stream:
        ninja = Writer(stream, width=1000)
        ninja.variable("builddir", str(path.parent))
        ninja.rule(
            "cxx",
            "g++ $flags -MMD -MT $out -MF $out.d -c $source -o $out",
            description="$source",
            depfile="$out.d",
            deps="gcc",
        )
        if plan.toolkit is not None:
            # nvcc's messages go to a file: the checks read the register figures again later.
            ninja.rule(
                "cuda",
                f"{shlex.quote(str(plan.toolkit.nvcc))} $flags -MD -MT $out -MF $out.d "
                "-c $source -o $out > $log 2>&1 || { cat $log; exit 1; }",
                description="$source [$archs]",
                depfile="$out.d",
                deps="gcc",
            )
        ninja.rule("link", "g++ -o $out $in $flags", description="link $out")
        for step in plan.steps:
            ninja.build(
                _escape(str(step.object)),
                "cuda" if step.is_cuda else "cxx",
                _escape(step.source),
                variables={
                    "source": step.source,
                    "flags": " ".join(shlex.quote(flag) for flag in step.flags),
                    "log": str(step.log),
                    "archs": " ".join(str(arch) for arch in step.archs),
                },
            )
        objects = [_escape(str(step.object)) for step in plan.steps]
        flags = " ".join(plan.link_flags)
        ninja.build(_escape(str(plan.library)), "link", objects, variables={"flags": flags})
        ninja.default(_escape(str(plan.library)))


def _escape(path: str) -> str:
    if " " in path:
        raise BuildError(f"{path}: a folder with a blank in its name cannot hold a build")
    return path.replace("$", "$$").replace(":", "$:")
