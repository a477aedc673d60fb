"""Builds variants: python -m tools.build --backend cpu, or --backend cuda --cuda 13.0.

Reads build.toml, compiles what changed with ninja, checks the result and puts it into
`build/<variant>/`, the layout that `kernels` loads.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock
from ninja import BIN_DIR as NINJA_BIN_DIR

from .archs import Arch
from .build_toml import BuildToml, read_build_toml
from .check import check_build
from .cuda_toolkit import CudaToolkit, get_toolkit, pypi_versions
from .errors import BuildError
from .ninja_file import BuildPlan, make_plan, write_ninja_file
from .offered import in_cuda_range, offered_variant
from .variant import lay_out_variant, ops_id, variant_name, write_registration_header

ROOT = Path(__file__).resolve().parent.parent
TOOLKIT_FOLDER = ROOT / ".toolkit"
# What one compiler process may need: nvcc on the largest attention kernel.
_BYTES_PER_JOB = 2 << 30


def main(arguments: list[str] | None = None) -> int:
    try:
        options = _parse(arguments)
        config = read_build_toml(options.root)
        _require_compiler()
        for backend, cuda_version in _requested(options, config):
            build_variant(config, options, backend, cuda_version)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what is compiled so far serves the next run
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.build", description=__doc__)
    parser.add_argument("--backend", choices=["cpu", "cuda"], action="append", default=[])
    parser.add_argument(
        "--cuda",
        metavar="X.Y",
        help=f"CUDA version of the cuda backend, default {pypi_versions()[0]}; PyPI has "
        + ", ".join(pypi_versions()),
    )
    parser.add_argument(
        "--for-this-torch",
        action="store_true",
        help="build the variant that the installed torch will be offered",
    )
    parser.add_argument(
        "--archs",
        metavar="A,B",
        help="only these capabilities of build.toml's, such as 9.0,9.0a",
    )
    parser.add_argument("--jobs", type=int, help="compilers at a time; default by cores and memory")
    parser.add_argument(
        "--skip-checks", action="store_true", help="for work in progress: a variant as it comes"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder of the variants, default build/")
    parser.add_argument(
        "--build-dir", type=Path, help="folder of the objects, default .build/, or OUT/.build"
    )
    parser.add_argument("--toolkit-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.root = options.root.resolve()
    if options.build_dir is None:
        options.build_dir = (options.out or options.root) / ".build"
    options.out = (options.out or options.root / "build").resolve()
    options.build_dir = options.build_dir.resolve()
    options.toolkit_dir = (options.toolkit_dir or TOOLKIT_FOLDER).resolve()
    return options


def _require_compiler() -> None:
    """What pip cannot bring."""
    for tool in ("g++", "c++filt"):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is not on the path; install g++ (Debian: apt install g++)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        raise BuildError(f"{header} is missing; install Python's headers (Debian: python3-dev)")


def _requested(options: argparse.Namespace, config: BuildToml) -> list[tuple[str, str | None]]:
    """The (backend, CUDA version) pairs that the command line asks for."""
    if options.for_this_torch:
        if options.backend or options.cuda:
            raise BuildError("--for-this-torch chooses backend and CUDA version itself")
        return [offered_variant(config)]
    cuda_version = options.cuda or pypi_versions()[0]
    requested = [
        (backend, cuda_version if backend == "cuda" else None)
        for backend in options.backend or config.general.backends
    ]
    for backend, version in requested:
        if backend not in config.general.backends:
            raise BuildError(f"--backend {backend}: build.toml's general.backends lacks it")
        if version is not None and not in_cuda_range(config, version):
            limits = config.general.cuda
            raise BuildError(
                f"--cuda {version}: build.toml's general.cuda allows "
                f"{limits.minver or 'any'} to {limits.maxver or 'any'}"
            )
    if (options.cuda or options.archs) and not any(version for _, version in requested):
        raise BuildError("--cuda and --archs are for the cuda backend")
    return requested


def build_variant(
    config: BuildToml, options: argparse.Namespace, backend: str, cuda_version: str | None
) -> Path:
    """Builds one variant and returns its folder.

    Raises:
        BuildError: nothing is left in the variant's folder but what was there before.
    """
    variant = variant_name(config, backend, cuda_version)
    build_dir = options.build_dir / variant
    build_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(build_dir / "lock"):
        toolkit = None
        archs: dict[str, list[Arch]] = {}
        if cuda_version is not None:
            toolkit = get_toolkit(cuda_version, options.toolkit_dir)
            archs = _choose_archs(config, options.archs, toolkit)
        name = ops_id(config, backend, options.root)
        write_registration_header(build_dir / "generated", name)
        plan = make_plan(
            config, options.root, build_dir, backend=backend, archs=archs, toolkit=toolkit
        )
        print(f"{variant}: {len(plan.steps)} sources, ops {name}", flush=True)
        _compile(plan, build_dir, options)
        if not options.skip_checks:
            check_build(plan, options.root, options.toolkit_dir)
        all_archs = sorted({arch for section in archs.values() for arch in section})
        if options.archs:  # not those of kernels that have none of them
            asked_for = {Arch.parse(text.strip()) for text in options.archs.split(",")}
            all_archs = [arch for arch in all_archs if arch.without_ptx in asked_for]
        staged = build_dir / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        lay_out_variant(
            staged,
            config,
            options.root,
            backend=backend,
            name=name,
            library=plan.library,
            archs=[str(arch) for arch in all_archs],
        )
        target = options.out / variant
        _replace_folder(staged, target)
    size = (target / f"{name}.abi3.so").stat().st_size
    for_archs = f", architectures {' '.join(map(str, all_archs))}" if all_archs else ""
    print(f"{variant}: {size / 1e6:.2f} MB{for_archs}; {target}", flush=True)
    return target


def _choose_archs(
    config: BuildToml, only: str | None, toolkit: CudaToolkit
) -> dict[str, list[Arch]]:
    """The capabilities of each section: build.toml's, as far as this toolkit knows them."""
    sections = {
        name: [Arch.parse(text) for text in kernel.cuda_capabilities]
        for name, kernel in config.kernels_for("cuda").items()
        if any(source.endswith(".cu") for source in kernel.src)
    }
    known = {arch: toolkit.knows(arch) for archs in sections.values() for arch in archs}
    wanted = None if only is None else _parse_only(only, set(known), toolkit)
    chosen = {}
    for name, archs in sections.items():
        chosen[name] = [arch for arch in archs if known[arch]]
        if not chosen[name]:
            raise BuildError(
                f"kernel.{name}: no capability left of {', '.join(map(str, archs))} that CUDA "
                f"{toolkit.version} knows"
            )
        if wanted is not None:
            chosen[name] = _asked_for(name, chosen[name], wanted)
    return chosen


def _asked_for(name: str, archs: list[Arch], wanted: set[Arch]) -> list[Arch]:
    """Those of a section that are wanted. A section that has none of them serves other devices, but
    the library is linked with its host code: it is built for one, of a wanted device if it can
    be."""
    asked_for = [arch for arch in archs if arch.without_ptx in wanted]
    if asked_for:
        return asked_for
    devices = {(arch.major, arch.minor) for arch in wanted}
    one = min(archs, key=lambda arch: ((arch.major, arch.minor) not in devices, arch)).without_ptx
    print(
        f"kernel.{name}: has none of {', '.join(map(str, sorted(wanted)))}; built for {one} alone"
    )
    return [one]


def _parse_only(only: str, listed: set[Arch], toolkit: CudaToolkit) -> set[Arch]:
    wanted = set()
    for text in only.split(","):
        try:
            arch = Arch.parse(text.strip()).without_ptx
        except ValueError as error:
            raise BuildError(f"--archs {only}: {error}") from None
        if not toolkit.knows(arch):
            raise BuildError(f"--archs {only}: nvcc {toolkit.version} does not know {arch}")
        if arch not in {other.without_ptx for other in listed}:
            raise BuildError(f"--archs {only}: no section of build.toml lists {arch}")
        wanted.add(arch)
    return wanted


def _compile(plan: BuildPlan, build_dir: Path, options: argparse.Namespace) -> None:
    ninja_file = build_dir / "build.ninja"
    write_ninja_file(ninja_file, plan)
    jobs = options.jobs or default_jobs()
    environment = dict(os.environ) if plan.toolkit is None else plan.toolkit.environment()
    environment["NINJA_STATUS"] = "[%f/%t, %e s] "
    if plan.toolkit is not None:
        # Not part of the command, which would compile everything anew on another machine size.
        cuda_steps = sum(step.is_cuda for step in plan.steps)
        threads = max(1, jobs // max(1, cuda_steps))
        environment["NVCC_APPEND_FLAGS"] = f"--threads {threads}"
    ninja = Path(NINJA_BIN_DIR) / "ninja"
    command = [str(ninja), "-f", str(ninja_file), "-j", str(jobs)]
    if subprocess.run(command, env=environment, cwd=options.root).returncode != 0:
        raise BuildError("the build failed; the command and the compiler's messages are above")


def default_jobs() -> int:
    """As many as there are cores, if memory allows."""
    meminfo = Path("/proc/meminfo").read_text()
    available = int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)[1]) << 10
    return max(1, min(len(os.sched_getaffinity(0)), available // _BYTES_PER_JOB))


def _replace_folder(staged: Path, target: Path) -> None:
    """Moves a finished variant into place: a reader finds the old one or the new one, whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(staged, incoming)
    outgoing = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(outgoing)
    incoming.rename(target)
    shutil.rmtree(outgoing, ignore_errors=True)
    shutil.rmtree(staged)


if __name__ == "__main__":
    sys.exit(main())
