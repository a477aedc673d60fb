"""Finds or installs the CUDA compiler of one exact version.

A toolkit of that version that is already on the machine is used as it is. Otherwise nvcc comes from
PyPI's wheels, into one folder per CUDA version: all versions of CUDA 13 share the package root
`nvidia/cu13`, so they cannot share a folder, nor the environment that holds torch.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from .archs import Arch
from .errors import BuildError

# All five pinned: the wheels' own requirements carry no versions, so pip would mix releases.
_WHEELS = {
    "13.0": {
        "nvidia-cuda-nvcc": "13.0.88",
        "nvidia-nvvm": "13.0.88",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-cuda-cccl": "13.0.85",
    },
    "13.2": {
        "nvidia-cuda-nvcc": "13.2.86",
        "nvidia-nvvm": "13.2.86",
        "nvidia-cuda-crt": "13.2.86",
        "nvidia-cuda-runtime": "13.2.86",
        "nvidia-cuda-cccl": "13.2.86",
    },
}
# Reads the objects of every CUDA 13 release; older ones are not on PyPI.
_CUOBJDUMP = {"nvidia-cuda-cuobjdump": "13.2.86"}


@dataclass(frozen=True)
class CudaToolkit:
    version: str  # major.minor
    root: Path

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    @property
    def include_dir(self) -> Path:
        return self.root / "include"

    @property
    def library_dir(self) -> Path | None:
        """The folder that holds the shared CUDA runtime."""
        for name in ("lib64", "lib", "targets/x86_64-linux/lib"):
            if (self.root / name / self.runtime_name).exists():
                return self.root / name
        return None

    @property
    def runtime_name(self) -> str:
        return f"libcudart.so.{self.version.split('.')[0]}"

    def is_complete(self) -> bool:
        """True when the compiler is of this version and the runtime to link with is there."""
        return self.library_dir is not None and _nvcc_version(self.nvcc) == self.version

    def environment(self) -> dict[str, str]:
        """For running nvcc: its own tools first, nobody else's extra flags."""
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
        }
        environment["CUDA_HOME"] = str(self.root)
        environment["PATH"] = f"{self.nvcc.parent}{os.pathsep}{environment.get('PATH', '')}"
        return environment

    def knows(self, arch: Arch) -> bool:
        """Asks the compiler itself; its printed lists leave out the a and f variants."""
        command = [str(self.nvcc), "--dryrun", "-c", "-x", "cu", *arch.gencode_flags(), os.devnull]
        result = subprocess.run(command, capture_output=True, text=True, env=self.environment())
        return result.returncode == 0


def pypi_versions() -> list[str]:
    """CUDA versions whose whole compiler PyPI has, oldest first."""
    return list(_WHEELS)


def buildable_versions() -> list[str]:
    """CUDA versions that can be built here: PyPI's and those of installed toolkits."""
    installed = {_nvcc_version(root / "bin" / "nvcc") for root in _installed_roots()}
    return sorted({*_WHEELS, *filter(None, installed)})


def find_installed(version: str) -> CudaToolkit | None:
    """A toolkit of this version on the machine, if any."""
    for root in _installed_roots():
        toolkit = CudaToolkit(version, root)
        if toolkit.is_complete():
            return toolkit
    return None


def _installed_roots() -> list[Path]:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [*sorted(glob.glob("/usr/local/cuda-*")), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    if on_path is not None:
        roots.append(str(Path(on_path).resolve().parent.parent))
    return [Path(root) for root in roots if root]


def get_toolkit(version: str, folder: Path) -> CudaToolkit:
    """The toolkit of this version: an installed one, else PyPI's, kept under `folder`.

    Raises:
        BuildError: there is none, or pip fails.
    """
    installed = find_installed(version)
    if installed is not None:
        return installed
    if version not in _WHEELS:
        raise BuildError(
            f"--cuda {version}: no CUDA {version} toolkit is installed (CUDA_HOME, PATH, "
            f"/usr/local/cuda-{version}), and PyPI has a whole compiler only for "
            + ", ".join(_WHEELS)
        )
    target = folder / f"cuda-{version}"
    pip_install(_WHEELS[version], target)
    root = target / "nvidia" / f"cu{version.split('.')[0]}"
    toolkit = CudaToolkit(version, root)
    if not toolkit.is_complete():
        raise BuildError(f"the wheels in {target} hold no whole CUDA {version}; delete the folder")
    return toolkit


def get_cuobjdump(folder: Path) -> Path:
    """The tool that lists the code that an object embeds."""
    target = folder / "cuobjdump"
    pip_install(_CUOBJDUMP, target)
    return next(target.glob("nvidia/*/bin/cuobjdump"))


def _nvcc_version(nvcc: Path) -> str | None:
    if not nvcc.is_file():
        return None
    result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True)
    match = re.search(r"release (\d+\.\d+)", result.stdout)
    return match[1] if match else None


def pip_install(wheels: dict[str, str], target: Path) -> None:
    """Installs exactly these wheels into `target`; nothing to do when they are there already."""
    pins = [f"{name}=={version}" for name, version in wheels.items()]
    stamp = target / "installed.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if stamp.is_file() and stamp.read_text().split() == pins:
            return
        shutil.rmtree(target, ignore_errors=True)
        print(f"installing {', '.join(pins)} into {target}", flush=True)
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps"]
        result = subprocess.run([*command, "--target", str(target), *pins])
        if result.returncode != 0:
            raise BuildError(f"pip could not install {', '.join(pins)}")
        stamp.write_text("\n".join(pins))
