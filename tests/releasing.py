"""A project that is ready to be released, for the tests of matrix, gate and release."""

import base64
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools import release
from tools.built import BuiltVariant, read_variant
from tools.gate_record import REQUIRED, Check, GateRecord, record_path, write_record

ROOT = Path(__file__).resolve().parents[1]
REPO_ID = "org/tiny-kernel"
CPU = "torch-stable-abi210-cpu-x86_64-linux"
CU130 = "torch-stable-abi210-cu130-x86_64-linux"
CU132 = "torch-stable-abi210-cu132-x86_64-linux"
OLDER_LINE = "torch-stable-abi209-cu130-x86_64-linux"

CARD = """\
---
library_name: kernels
license: {{ license }}
---

# {{ repo_id }}, version {{ version }}
{% for name in functions or [] %}
- `{{ name }}`
{% endfor %}
{% if has_benchmark %}
`kernels benchmark {{ repo_id }}`
{% endif %}
"""

FILES = {
    "CARD.md": CARD,
    "benchmarks/benchmark.py": "# measures\n",
    "benchmarks/other.py": "# not part of a release\n",
    "tests/conftest.py": "import os, pytest\n"
    "@pytest.fixture\n"
    "def kernel():\n"
    "    from kernels import get_kernel\n"
    f"    return get_kernel('{REPO_ID}', revision=os.environ.get('KERNEL_REVISION', 'v1'))\n",
    "tests/attention/test_gqa_backward.py": "def test_it(kernel):\n"
    "    assert kernel.name('x').endswith('::x')\n",
    "tests/norms/test_norms.py": "def test_it():\n    pass\n",
    ".gitignore": "/build/\n/.build/\n/dist/\n__pycache__/\n",
}


def api(**changes) -> dict:
    """The surface that the tiny project's gate would record."""
    surface = {
        "all": ["name"],
        "functions": {"name": "(op_name)"},
        "layers": {},
        "private": {},
        "ops": {"answer": "(Tensor x) -> Tensor"},
        "dtypes": {},
        "head-dims": {},
    }
    return {**surface, **changes}


def prepare(project) -> "ReleaseProject":
    """Makes the tiny project releasable, commits it and builds its CPU variant."""
    project.replace("build.toml", "version = 3", "version = 1")
    project.replace("build.toml", "[torch]\n", f'[general.hub]\nrepo-id = "{REPO_ID}"\n\n[torch]\n')
    ready = ReleaseProject(project.root)
    for name, text in FILES.items():
        ready.write(name, text)
    hub = ROOT / "tests" / "loopback_hub"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(hub, project.root / "tests" / "loopback_hub", ignore=ignored)
    ready.git("init", "-q", "-b", "main")
    ready.commit()
    result = project.build("--backend", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    return ready


class ProjectFolder:
    """A project's files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))


class ReleaseProject(ProjectFolder):
    """A project's folder, with the steps of a release."""

    @property
    def build(self) -> Path:
        return self.root / "build"

    def copy_to(self, root: Path) -> "ReleaseProject":
        shutil.copytree(self.root, root, symlinks=True)
        return ReleaseProject(root)

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self) -> str:
        self.git("add", ".")
        self.git("commit", "-qm", "x", "--allow-empty")
        return self.git("rev-parse", "HEAD")

    # Variants

    def variant(self, name: str = CPU) -> BuiltVariant:
        return read_variant(self.build / name)

    def stamp(self, name: str, *, code: str | None = None, **metadata) -> BuiltVariant:
        """Makes a variant look as if it had been built from HEAD, with other Python code."""
        folder = self.build / name
        if not folder.exists():
            shutil.copytree(self.build / CPU, folder)
        if code is not None:
            (folder / "__init__.py").write_text(code)
        path = folder / "metadata.json"
        data = json.loads(path.read_text())
        data["source-commit"] = self.git("rev-parse", "HEAD")
        data["backend"] = {"type": "cpu"} if "-cpu-" in name else {"type": "cuda", "archs": ["9.0"]}
        data["digest"]["files"] = {
            file.relative_to(folder).as_posix(): base64.b64encode(
                hashlib.sha256(file.read_bytes()).digest()
            ).decode()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file != path
        }
        path.write_text(json.dumps({**data, **metadata}))
        return self.variant(name)

    def pass_gate(self, name: str = CPU, *, failed: tuple[str, ...] = (), **changes) -> Path:
        variant = self.variant(name)
        values = {
            "variant": name,
            "digest": variant.digest,
            "library": variant.library.name,
            "library_sha256": variant.library_sha256,
            "commit": variant.commit,
            "device": "a device",
            "capability": None,
            "torch": "2.13.0",
            "torch_cuda": None,
            "python": "3.11.2",
            "kernels": "0.17.2",
            "loaded_through": "get_kernel",
            "why_local": "",
            "command": "python -m tools.gate",
            "date": "2026-01-01T00:00:00+00:00",
            "checks": [Check(check, check not in failed, 1.0) for check in REQUIRED],
            "api": api(),
        }
        record = GateRecord(**{**values, **changes})
        path = record_path(variant, record.torch)
        write_record(path, record)
        return path

    def next_commit(self, code: str) -> str:
        """A fix, built and gated: the same API from newer sources."""
        self.write("csrc/fix.txt", code[:100])
        commit = self.commit()
        for folder in sorted(self.build.glob("torch-*")):
            if folder.is_dir():
                self.stamp(folder.name, code=code)
                self.pass_gate(folder.name)
        return commit

    # Releases

    def release(self, *arguments: str) -> tuple[int, str]:
        """Runs the command in this process; its status and all that it said."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if arguments[:1] == ("verify",):
                status = release.main(["verify", "--root", str(self.root), *arguments[1:]])
            else:
                status = release.main(["--root", str(self.root), *arguments])
        return status, said.getvalue()

    def release_command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tools.release", "--root", str(self.root), *arguments]

    def lock_text(self, version: int = 1) -> str | None:
        path = self.root / "releases" / f"v{version}.toml"
        return path.read_text() if path.exists() else None

    def snapshot(self) -> dict[str, str]:
        """Every file outside .git, so that a test can say: the local build is untouched."""
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".git" not in path.parts and "__pycache__" not in path.parts
        }


def contents(hub, branch: str, repo_id: str = REPO_ID) -> dict[str, bytes] | None:
    """Every file of a branch of the loopback Hub; None when there is no such branch."""
    repository = hub.store.repository("kernel", repo_id)
    if branch not in repository.branches:
        return None
    tree = repository.resolve(branch).tree
    return {path: hub.store.read_blob(entry.blob) for path, entry in sorted(tree.items())}


def history(hub, branch: str, repo_id: str = REPO_ID) -> list[str]:
    """The titles of a branch's commits, newest first."""
    repository = hub.store.repository("kernel", repo_id)
    titles, oid = [], repository.branches[branch]
    while oid:
        commit = repository.commits[oid]
        titles.append(commit.title)
        oid = commit.parent
    return titles


def environment_of(hub) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LOCAL_KERNELS"))}
    return {**base, **hub.environment(), "HF_TOKEN": "hf_writer", "PYTHONPATH": str(ROOT)}


def refusal(ready, *arguments: str) -> str:
    """What a release says that must not happen; nothing changes on either side."""
    before = ready.snapshot()
    status, said = ready.release(*arguments)
    assert status == 1, said
    assert "error: " in said
    assert ready.snapshot() == before
    return said
