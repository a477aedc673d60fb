"""What users of two published versions find: pins, locks, both versions at once, a changed file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from loopback_hub import LoopbackHub
from releasing import CPU, REPO_ID, ReleaseProject, api, contents, environment_of

NEXT_CODE = (
    '__all__ = ["name", "other"]\nfrom ._ops import add_op_namespace_prefix as name\nother = name\n'
)
NEXT_API = api(all=["name", "other"], functions={"name": "(op_name)", "other": "(op_name)"})


@dataclass
class Published:
    """A project with two versions on a Hub, each from the commit that carries it."""

    project: ReleaseProject
    hub: LoopbackHub
    ops: dict[int, str]  # the namespace of each version's ops

    def commit(self, branch: str) -> str:
        return self.hub.store.repository("kernel", REPO_ID).branches[branch]

    def run(self, *command: str, home: Path, offline: bool = False) -> str:
        environment = {**environment_of(self.hub), "HF_HOME": str(home)}
        environment.update(LOCAL_KERNELS=None, HF_HUB_OFFLINE="1" if offline else None)
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        result = processes.run(command, environment=environment, timeout=120)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def kernels(self, *arguments: str, home: Path) -> str:
        """The loader's command line, from the environment that runs the tests."""
        command = Path(sys.executable).with_name("kernels")
        return self.run(str(command), *arguments, home=home)

    def python(self, code: str, home: Path, offline: bool = False) -> str:
        return self.run(sys.executable, "-c", code, home=home, offline=offline)


@pytest.fixture(scope="module")
def published(_ready_project, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    project = _ready_project.copy_to(folder / "project")
    with LoopbackHub(folder / "hub", token="hf_writer", trusted_publishers=["org"]) as hub:
        world = Published(project, hub, {})
        publish = project.release_command("--publish", "--create-repository")
        world.ops[1] = project.variant().ops_id
        project.pass_gate()
        world.run(*publish, home=folder / "home")

        project.replace("build.toml", "version = 1", "version = 2")
        project.write("torch-ext/tiny_kernel/__init__.py", NEXT_CODE)
        project.commit()
        build = [sys.executable, "-m", "tools.build", "--root", str(project.root)]
        world.run(*build, "--backend", "cpu", home=folder / "home")
        world.ops[2] = project.variant().ops_id
        project.pass_gate(api=NEXT_API)
        assert "added: other" in world.run(*publish, home=folder / "home")
        yield world


def test_each_version_has_its_own_branch_and_record(published):
    for version in (1, 2):
        files = contents(published.hub, f"v{version}")
        released = json.loads(files["release.json"])
        assert released["version"] == version
        assert f"build/{CPU}/{published.ops[version]}.abi3.so" in files
        assert published.project.lock_text(version) is not None
    assert "version 2" in contents(published.hub, "main")["README.md"].decode()


def test_every_pin_and_both_versions_in_one_process(published, tmp_path):
    one, two = published.commit("v1"), published.commit("v2")
    pins = [{"version": 1}, {"revision": "v1"}, {"revision": one}]
    pins += [{"version": 2}, {"revision": "v2"}, {"revision": two}]
    code = (
        "from kernels import get_kernel\n"
        f"for pin in {pins}: print(get_kernel({REPO_ID!r}, **pin).name('x'))"
    )
    one, two = (f"{published.ops[version]}::x" for version in (1, 2))
    assert one != two
    assert published.python(code, tmp_path).split() == [one] * 3 + [two] * 3


def test_versions(published, tmp_path):
    said = published.kernels("versions", REPO_ID, home=tmp_path)
    assert said.index("Version 1:") < said.index("Version 2:")
    assert said.count(CPU) == 2


def test_lock_download_and_offline(published, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    home = tmp_path / "home"
    published.kernels("lock", str(tmp_path), home=home)
    locks = (tmp_path / "kernels.lock").read_text()
    assert published.commit("v1") in locks
    assert published.commit("v2") not in locks
    published.kernels("download", "--all-variants", str(tmp_path), home=home)
    code = (
        "from pathlib import Path\nfrom kernels import load_kernel\n"
        f"lock = Path({str(tmp_path / 'kernels.lock')!r})\n"
        f"print(load_kernel({REPO_ID!r}, lockfile=lock).name('x'))"
    )
    # huggingface_hub remembers the whole listing and then misses the files beside build/.
    for listing in home.glob("hub/*/trees"):
        listing.rename(listing.with_name("trees.unused"))
    assert published.python(code, home, offline=True) == f"{published.ops[1]}::x\n"


def test_verify_finds_a_changed_file_in_a_cache(published, tmp_path):
    code = f"from kernels import get_kernel\nprint(get_kernel({REPO_ID!r}, version=2).__file__)"
    folder = Path(published.python(code, tmp_path).strip()).parent
    status, said = published.project.release("verify", str(folder))
    assert status == 0, said
    (folder / "_ops.py").resolve().write_text("import os\n")
    status, said = published.project.release("verify", str(folder.parents[1]))
    assert status == 1
    assert f"{CPU}: File hash mismatch for _ops.py" in said


def test_verify_a_pinned_commit(published, tmp_path):
    for version in (1, 2):
        what = f"{REPO_ID}@{published.commit(f'v{version}')}"
        command = [sys.executable, "-m", "tools.release", "verify", what]
        said = published.run(*command, "--root", str(published.project.root), home=tmp_path)
        assert f"{CPU}: " in said
        assert "files as built" in said
