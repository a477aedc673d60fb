"""A project of a few lines that the builder compiles in about a second."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from releasing import CPU, CU130, REPO_ID, ProjectFolder, ReleaseProject, api, prepare

ROOT = Path(__file__).resolve().parents[2]

BUILD_TOML = """\
[general]
name = "tiny-kernel"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]
source = "https://github.com/example/tiny-kernel"

[torch]
src = ["torch-ext/torch_binding.cpp"]

[torch.stable-abi]
cpu = "2.10"
cuda = "2.10"

[kernel.answer_cpu]
backend = "cpu"
depends = []
include = ["csrc"]
src = ["csrc/answer.cpp", "csrc/other.cpp", "csrc/answer.h"]

[kernel.answer_cuda]
backend = "cuda"
depends = []
include = ["csrc"]
cuda-capabilities = ["8.0+PTX", "9.0a"]
src = ["csrc/answer.cu"]
"""

FILES = {
    "torch-ext/torch_binding.cpp": '#include "registration.h"\n'
    "REGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n",
    "torch-ext/tiny_kernel/__init__.py": '__all__ = ["name"]\n'
    "from ._ops import add_op_namespace_prefix as name\n",
    "csrc/answer.h": "#pragma once\nint answer();\n",
    "csrc/answer.cpp": '#include "answer.h"\nint answer() { return 42; }\n',
    "csrc/other.cpp": "int other() { return 1; }\n",
    "csrc/answer.cu": "__global__ void scale(float* x) { x[threadIdx.x] *= 2; }\n"
    "int launch(float* x) { scale<<<1, 32>>>(x); return 0; }\n",
}


class Project(ProjectFolder):
    """A project in a folder of its own, and the command that builds it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.write("build.toml", BUILD_TOML)
        for name, text in FILES.items():
            self.write(name, text)

    def commit(self) -> str:
        """Commits everything; returns the first digits of the tree's id."""
        self.write(".gitignore", "/build/\n/.build/\n")
        git = ["git", "-C", str(self.root), "-c", "user.name=t", "-c", "user.email=t@localhost"]
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
            subprocess.run([*git, *command], check=True)
        tree = subprocess.run([*git, "rev-parse", "HEAD^{tree}"], capture_output=True, text=True)
        return tree.stdout[:7]

    def build(
        self, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tools.build", "--root", str(self.root), *arguments]
        return subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env=None if environment is None else {**os.environ, **environment},
        )

    def variants(self) -> list[str]:
        folder = self.root / "build"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture(scope="session")
def _ready_project(tmp_path_factory):
    return prepare(Project(tmp_path_factory.mktemp("ready") / "project"))


@pytest.fixture
def ready(_ready_project, tmp_path) -> ReleaseProject:
    """A committed and built project of its own; its CPU variant has no gate record yet."""
    return _ready_project.copy_to(tmp_path / "ready")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A loopback Hub with the project's repository, which this process's huggingface_hub uses."""
    with LoopbackHub(tmp_path / "hub", token="hf_writer") as server:
        server.store.create_repository("kernel", REPO_ID)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # huggingface_hub's retries
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        yield server


@pytest.fixture
def published(ready, hub):
    """Version 1 with two variants, out already."""
    ready.stamp(CU130)
    ready.pass_gate(CPU)
    ready.pass_gate(CU130, api=api(**{"dtypes": {"attention cuda": "bfloat16"}}))
    status, said = ready.release("--publish")
    assert status == 0, said
    ready.commit()
    for name in (CPU, CU130):
        ready.stamp(name)
        ready.pass_gate(name)
    return ready
