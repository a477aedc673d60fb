"""Compiles csrc's host code and native_module.cpp into a Python module, once per change."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest
import torch
from filelock import FileLock

from tools.build_toml import read_build_toml

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / ".build" / "native"
NAME = "flash_attn_norm_native"

RULES = """
rule compile
  command = c++ -std=c++17 -O3 -fPIC -Wall -Wextra {includes} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = c++ -shared $in -o $out -pthread
"""


def _sources() -> list:
    """All C++ of csrc/attention for the CPU, as build.toml lists it, and what it calls."""
    listed = read_build_toml(ROOT).kernel["attention_cpu"].src
    sources = [ROOT / path for path in listed if path.endswith(".cpp")]
    own = [Path(__file__).parent / name for name in (f"{NAME}.cpp", "sm90_native.cpp")]
    return [*sources, ROOT / "csrc/common/cpu_features.cpp", *own]


def _build() -> Path:
    includes = [ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    lines = [RULES.format(includes=" ".join(f"-I{path}" for path in includes))]
    objects = []
    for source in _sources():
        objects.append(FOLDER / f"{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {source}")
    library = FOLDER / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    lines.append(f"build {library}: link {' '.join(map(str, objects))}\n")
    (FOLDER / "build.ninja").write_text("\n".join(lines))
    command = [sys.executable, "-m", "ninja", "-C", str(FOLDER)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return library


@pytest.fixture(scope="session")
def native():
    """The module of native_module.cpp."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):  # test runs share the folder, and may run at once
        library = _build()
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread_for_torch():
    """The formulas here are small, and the kernels bring threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
