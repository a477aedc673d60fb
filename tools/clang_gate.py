"""Compiles the CUDA sources for CUDA 12.6, which PyPI has no nvcc for: a gate, not a release build.

Debian's clang takes nvcc's place, with the headers, ptxas and libdevice of PyPI's CUDA 12.6 wheels
and `fatbinary` of a CUDA 13 toolkit. What comes out links against libcudart.so.12 but goes nowhere:
variants for CUDA 12.6 are made by kernel-builder, with NVIDIA's own compiler.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ninja import BIN_DIR as NINJA_BIN_DIR

from .archs import Arch
from .build_toml import BuildToml
from .check_abi import check_library
from .clang_as_nvcc import CLANG
from .cuda_toolkit import CudaToolkit, get_toolkit, pip_install, pypi_versions
from .errors import BuildError
from .ninja_file import make_plan, write_ninja_file
from .offered import in_cuda_range
from .variant import ops_id, write_registration_header

VERSION = "12.6"
_WHEELS = {
    "nvidia-cuda-nvcc-cu12": "12.6.85",
    "nvidia-cuda-runtime-cu12": "12.6.77",
    "nvidia-cuda-cccl-cu12": "12.6.77",
}
# The oldest and the newest that 12.6 knows; those between take the same code.
_ARCHS = (Arch(8, 0), Arch(9, 0), Arch(9, 0, "a"))


def is_wanted(config: BuildToml) -> bool:
    return "cuda" in config.general.backends and in_cuda_range(config, VERSION)


def why_not_here() -> str:
    """Why the gate cannot run on this machine; empty when it can."""
    if shutil.which(CLANG) is None:
        return f"{CLANG} is not installed (Debian: apt install clang-19)"
    return ""


def compile_all(
    config: BuildToml, root: Path, build_dir: Path, toolkit_dir: Path, jobs: int
) -> list[str]:
    """Compiles every source of the cuda backend and links; returns the architectures compiled for.

    Raises:
        BuildError: a source does not compile, or a symbol is missing from 12.6's runtime.
    """
    toolkit = _get_toolkit(toolkit_dir)
    archs = {}
    for name, kernel in config.kernels_for("cuda").items():
        listed = {Arch.parse(text).without_ptx for text in kernel.cuda_capabilities}
        archs[name] = [arch for arch in _ARCHS if arch in listed]
    write_registration_header(build_dir / "generated", ops_id(config, "cuda", root))
    plan = make_plan(config, root, build_dir, backend="cuda", archs=archs, toolkit=toolkit)
    # A section with nothing for 12.6, such as one for newer cards alone, is left out.
    steps = [step for step in plan.steps if step.archs or not step.is_cuda]
    is_whole = len(steps) == len(plan.steps)
    plan = replace(plan, steps=steps)
    ninja_file = build_dir / "build.ninja"
    write_ninja_file(ninja_file, plan)
    command = [str(Path(NINJA_BIN_DIR) / "ninja"), "-f", str(ninja_file), "-j", str(jobs)]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t, %e s] "}
    if subprocess.run(command, env=environment, cwd=root).returncode != 0:
        raise BuildError(f"CUDA {VERSION}: the sources do not compile; the messages are above")
    # What no source and not 12.6's runtime defines shows as an import without a version.
    problems = check_library(plan.library) if is_whole else []
    if problems:
        raise BuildError(f"CUDA {VERSION}: " + "; ".join(problems))
    return sorted({str(arch) for section in archs.values() for arch in section})


def _get_toolkit(folder: Path) -> CudaToolkit:
    """A folder that looks like a CUDA 12.6 toolkit, put together from the wheels."""
    wheels = folder / "cuda-12.6-wheels"
    pip_install(_WHEELS, wheels)
    root = folder / "cuda-12.6"
    newer = get_toolkit(pypi_versions()[0], folder)
    stamp, made_of = root / "made-of.txt", f"{_WHEELS}\n{newer.nvcc}\n{sys.executable}\n"
    if stamp.is_file() and stamp.read_text() == made_of:
        return CudaToolkit(VERSION, root)
    shutil.rmtree(root, ignore_errors=True)
    parts = wheels / "nvidia"
    for part in ("cuda_nvcc", "cuda_runtime", "cuda_cccl"):
        for name in ("include", "lib"):
            _link_files(parts / part / name, root / name)
    _link_files(parts / "cuda_nvcc" / "nvvm" / "libdevice", root / "nvvm" / "libdevice")
    _link_files(parts / "cuda_nvcc" / "bin", root / "bin")
    # clang includes it always; it comes with a library that we do not use.
    (root / "include" / "curand_mtgp32_kernel.h").touch()
    _write_script(root / "bin" / "nvcc", "nvcc", root)
    _write_script(root / "bin" / "fatbinary", "fatbinary", newer.nvcc.with_name("fatbinary"))
    stamp.write_text(made_of)
    return CudaToolkit(VERSION, root)


def _link_files(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def _write_script(path: Path, program: str, argument: Path) -> None:
    translator = Path(__file__).with_name("clang_as_nvcc.py")
    words = [sys.executable, str(translator), program, str(argument)]
    path.unlink(missing_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
