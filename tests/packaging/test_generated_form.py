"""Both doors give the same build: ours is held against the form that kernel-builder documents.

What it does is told in its own words: kernel-builder/src/pyproject/templates (kernel.cmake,
utils.cmake, torch/preamble.cmake) and nix-builder/pkgs/torch-ops-check of huggingface/kernels.
"""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from kernels._rust import Metadata
from releasing import CPU, CU130

from tests.packaging.conftest import ROOT
from tools.archs import Arch
from tools.build_toml import read_build_toml
from tools.cuda_toolkit import CudaToolkit
from tools.ninja_file import make_plan
from tools.variant import write_registration_header

CONFIG = read_build_toml(ROOT)
PACKAGE = ROOT / "torch-ext" / CONFIG.general.python_name

# What kernel-builder defines on the command line. TORCH_TARGET_VERSION is for [torch] with a stable
# ABI: major in the highest byte, minor in the next.
DEFINED = {
    "cpu": {"CPU_KERNEL"},
    "cuda": {"CUDA_KERNEL", "USE_CUDA=1"},
}
TORCH_DEFINED = {"Py_LIMITED_API=3", f"TORCH_TARGET_VERSION={(2 << 56) | (10 << 48):#x}"}
# ... and in registration.h.
MACROS = {
    "TORCH_EXTENSION_NAME",
    "TORCH_LIBRARY_EXPAND",
    "TORCH_LIBRARY_IMPL_EXPAND",
    "STABLE_TORCH_LIBRARY_EXPAND",
    "STABLE_TORCH_LIBRARY_IMPL_EXPAND",
    "REGISTER_EXTENSION",
}
# The capabilities that it intersects a section's own with, by CUDA version.
OLD = "7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0"
NEW = "7.5 8.0 8.6 8.7 8.9 9.0 10.0 11.0 12.0 12.1"
BASE_ARCHS = {"12.6": OLD, "13.0": NEW, "13.2": NEW}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def steps(request, tmp_path_factory):
    toolkit = CudaToolkit("13.0", Path("/cuda")) if request.param == "cuda" else None
    archs = {
        name: [Arch.parse(text) for text in kernel.cuda_capabilities]
        for name, kernel in CONFIG.kernels_for(request.param).items()
    }
    folder = tmp_path_factory.mktemp("plan")
    plan = make_plan(CONFIG, ROOT, folder, backend=request.param, archs=archs, toolkit=toolkit)
    return request.param, plan.steps


def defines(flags: list[str]) -> set[str]:
    return {flag.removeprefix("-D") for flag in flags if flag.startswith("-D")}


def test_definitions(steps):
    """No source can come to need one that only our build sets."""
    backend, all_steps = steps
    for step in all_steps:
        more = TORCH_DEFINED if step.kernel is None else set()
        assert defines(step.flags) == DEFINED[backend] | more, step.source


def test_flags(steps):
    newer = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
    for step in steps[1]:
        host = " ".join(step.flags)
        assert f"-std=c++{20 if newer else 17}" in step.flags, step.source
        assert "-O3" in step.flags
        assert "-fPIC" in host
        assert "-fno-gnu-unique" in host
        if step.is_cuda:
            assert {"--expt-relaxed-constexpr", "--expt-extended-lambda"} <= set(step.flags)
            section = CONFIG.kernel[step.kernel].cuda_capabilities
            codes = [flag for text in section for flag in gencode(text)]
            assert [flag for flag in step.flags if "gencode" in flag] == codes, step.source


def gencode(capability: str) -> list[str]:
    digits = capability.removesuffix("+PTX").replace(".", "")
    kinds = ["sm", "compute"] if capability.endswith("+PTX") else ["sm"]
    return [f"-gencode=arch=compute_{digits},code={kind}_{digits}" for kind in kinds]


def test_sources_ask_for_no_other_macro():
    conditions = {"CUDA_KERNEL", "CPU_KERNEL"}
    compilers = re.compile(r"__\w+(__)?$")  # the compilers' own, such as __CUDA_ARCH__
    asked = set()
    for folder in ("csrc", "torch-ext"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                lines = re.findall(
                    r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)$", path.read_text(), re.M
                )
                asked |= set(re.findall(r"[A-Za-z_]\w*", " ".join(lines)))
    unknown = {name for name in asked - {"defined"} if not compilers.fullmatch(name)}
    assert unknown <= conditions


def test_registration_header(tmp_path):
    write_registration_header(tmp_path, "_ops")
    text = (tmp_path / "registration.h").read_text()
    given = {name for name in re.findall(r"#define (\w+)", text) if not name.startswith("FAN_")}
    assert given <= MACROS
    sources = "".join(path.read_text() for path in (ROOT / "torch-ext").glob("*.cpp"))
    used = {name for name in MACROS if re.search(rf"\b{name}\b", sources)}
    assert used <= given
    assert {"STABLE_TORCH_LIBRARY_EXPAND", "REGISTER_EXTENSION"} <= used


def test_the_package_takes_two_names_from_ops_py(steps, kernel):
    taken = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "_ops":
                taken |= {alias.name for alias in node.names}
    assert taken == {"ops", "add_op_namespace_prefix"}
    generated = (Path(kernel.__file__).parent / "_ops.py").read_text()
    names = {node.name for node in ast.parse(generated).body if isinstance(node, ast.FunctionDef)}
    names |= {n.targets[0].id for n in ast.parse(generated).body if isinstance(n, ast.Assign)}
    assert names == taken


def test_ops_are_registered_under_the_name_of_the_build():
    """kernel-builder refuses a registration of torch.library whose op is not named through _ops.py;
    a Library, which names no op, has to be of the build's own namespace."""
    registered = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func).startswith("torch.library."):
                name = ast.unparse(node.args[0])
                if node.func.attr == "Library":
                    assert name == "ops.name", path.name
                    continue
                assert re.fullmatch(r"add_op_namespace_prefix\('\w+'\)", name), (path.name, name)
                registered += 1
    assert registered >= 6


@pytest.mark.parametrize("variant", [CPU, CU130])
def test_metadata(variant):
    folder = ROOT / "build" / variant
    text = (folder / "metadata.json").read_bytes()
    metadata = json.loads(text)
    own = {"source-trees", "source-commit", "source-dirty"}  # keys that a loader passes over
    documented = {"name", "id", "version", "license", "python-depends", "backend", "digest"}
    assert documented <= set(metadata)
    assert set(metadata) - documented - own <= {"kernels-minver", "source", "upstream"}
    backend = "cpu" if variant == CPU else "cuda"
    assert metadata["backend"]["type"] == backend
    tree = r"[0-9a-f]{7}(_dirty)?"
    assert re.fullmatch(rf"_{CONFIG.general.python_name}_{backend}_{tree}", metadata["id"])
    assert (folder / f"{metadata['id']}.abi3.so").is_file()
    assert Metadata.from_bytes(text).digest is not None


def loose_intersection(listed: list[str], base: str) -> set[str]:
    """The capabilities of a section that kernel-builder compiles for: for every one of `base` the
    highest listed one that serves it. PTX serves all that are newer, native code its own major."""
    own = [Arch.parse(text) for text in listed]
    devices = [Arch.parse(text) for text in base.split()]
    exact = [a for a in own if a.suffix and Arch(a.major, a.minor) in devices]
    taken = {Arch(a.major, a.minor) for a in exact}
    chosen = {str(a) for a in exact}
    plain = sorted((a for a in own if not a.suffix), key=lambda a: (a.major, a.minor))
    for device in (d for d in devices if d not in taken):
        fitting = [
            a
            for a in plain
            if (a.major, a.minor) <= (device.major, device.minor)
            and (a.ptx or a.major == device.major)
        ]
        chosen |= {str(a) for a in fitting[-1:]}
    return chosen


@pytest.mark.parametrize("cuda", BASE_ARCHS)
@pytest.mark.parametrize("section", [n for n, k in CONFIG.kernel.items() if k.cuda_capabilities])
def test_capabilities(section, cuda):
    """No section is left empty, which kernel-builder takes for an error, and none is cut down where
    the compiler knows all that it lists."""
    listed = CONFIG.kernel[section].cuda_capabilities
    chosen = loose_intersection(listed, BASE_ARCHS[cuda])
    newest = 9 if cuda == "12.6" else 12
    assert chosen == {text for text in listed if Arch.parse(text).major <= newest}
    assert chosen


def test_loose_intersection():
    assert loose_intersection(["8.0+PTX"], "9.0") == {"8.0+PTX"}
    assert loose_intersection(["7.5", "8.0", "8.6", "9.0", "9.0a"], "8.0 8.9 9.0") == {
        *("8.0", "8.6", "9.0a"),
    }
    assert loose_intersection(["12.0"], OLD) == set()
