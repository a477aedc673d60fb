"""Releases to a Hub and to a folder: what they publish, show and refuse."""

import json
import os
import shutil
import subprocess
import sys
import tomllib

import pytest
from releasing import (
    CPU,
    CU130,
    CU132,
    OLDER_LINE,
    REPO_ID,
    ROOT,
    api,
    contents,
    environment_of,
    history,
    refusal,
)

from tools.build_toml import read_build_toml
from tools.card import render_card


def test_dry_run_shows_and_changes_nothing(ready, hub):
    ready.pass_gate()
    before, main = ready.snapshot(), contents(hub, "main")
    status, said = ready.release()
    assert status == 0, said
    assert f"added      {CPU}" in said
    assert "dry run: nothing was written" in said
    assert "API        1 public names, first record of them" in said
    assert ready.snapshot() == before
    assert contents(hub, "v1") is None
    assert contents(hub, "main") == main


def test_publishes_one_commit_for_each_branch(ready, hub):
    ready.pass_gate()
    status, said = ready.release("--publish")
    assert status == 0, said

    variant = ready.variant()
    on_branch = contents(hub, "v1")
    expected = {f"build/{CPU}/{name}" for name in variant.files()}
    expected |= {"benchmarks/benchmark.py", "release.json", ".gitattributes"}
    assert set(on_branch) == expected
    assert on_branch[f"build/{CPU}/{variant.library.name}"] == variant.library.read_bytes()
    assert history(hub, "v1") == [
        f"Release v1 from {variant.commit[:12]}",
        "initial commit",
    ]
    assert history(hub, "main") == ["Card of v1", "initial commit"]
    assert set(hub.store.repository("kernel", REPO_ID).branches) == {"main", "v1"}
    card = contents(hub, "main")["README.md"].decode()
    assert "license: apache-2.0" in card
    assert f"# {REPO_ID}, version 1\n- `name`\n`kernels benchmark {REPO_ID}`\n" in card

    lock = tomllib.loads(ready.lock_text())
    assert lock["commit"] == variant.commit
    assert lock["variants"][CPU]["digest"] == variant.digest
    assert lock["variants"][CPU]["library-sha256"] == variant.library_sha256
    assert lock["variants"][CPU]["gate"][0]["device"] == "a device"
    assert lock["api"] == api()
    head = hub.store.repository("kernel", REPO_ID).branches["v1"]
    assert lock["published"] == {"to": REPO_ID, "endpoint": hub.url, "commit": head}
    released = json.loads(on_branch["release.json"])
    assert released["variants"] == lock["variants"]


def test_the_command_publishes_and_the_loader_loads_it(ready, hub, tmp_path):
    ready.pass_gate()
    command = ready.release_command("--publish")
    environment = environment_of(hub)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

    script = (
        "from kernels import get_kernel\n"
        f"print(get_kernel('{REPO_ID}', version=1, trust_remote_code=True).name('x'))"
    )
    cold = {**environment, "HF_HOME": str(tmp_path / "cold")}
    loaded = subprocess.run(
        [sys.executable, "-c", script], env=cold, capture_output=True, text=True
    )
    assert loaded.stdout == f"{ready.variant().ops_id}::x\n", loaded.stderr


def test_a_second_run_changes_nothing(ready, hub):
    ready.pass_gate()
    assert ready.release("--publish")[0] == 0
    heads, lock = dict(hub.store.repository("kernel", REPO_ID).branches), ready.lock_text()
    for commit in ("HEAD", ready.variant().commit):
        status, said = ready.release("--publish", "--commit", commit)
        assert status == 0, said
        assert f"unchanged  {CPU}" in said
        assert "nothing to do" in said
        assert hub.store.repository("kernel", REPO_ID).branches == heads
        assert ready.lock_text() == lock
        ready.commit()  # the lock


def test_replaces_every_variant_and_stale_files(published, hub):
    published.next_commit(
        '__all__ = ["name"]\nfrom ._ops import add_op_namespace_prefix as name\n#'
    )
    old_files = set(contents(hub, "v1"))
    renamed = published.build / CPU / "renamed.py"
    renamed.write_text("")
    published.stamp(CPU)
    published.pass_gate(CPU)
    (published.root / "benchmarks" / "benchmark.py").unlink()
    published.write("benchmarks/benchmark_other.py", "")
    published.commit()
    for name in (CPU, CU130):
        published.stamp(name)
        published.pass_gate(name)
    status, said = published.release("--publish")
    assert status == 0, said
    assert f"replaced   {CPU}" in said
    assert f"replaced   {CU130}" in said
    new_files = set(contents(hub, "v1"))
    assert new_files - old_files == {f"build/{CPU}/renamed.py", "benchmarks/benchmark_other.py"}
    assert old_files - new_files == {"benchmarks/benchmark.py"}
    assert len(history(hub, "v1")) == 3


def test_removes_a_variant_that_it_does_not_replace(published, hub):
    """The fault that began all this: fixed and broken builds side by side on one branch."""
    shutil.rmtree(published.build / CU130)
    published.next_commit("# fixed")
    status, said = published.release("--publish")
    assert status == 0, said
    assert f"removed    {CU130}" in said
    assert not [path for path in contents(hub, "v1") if CU130 in path]


def test_leaves_out_by_name_what_has_no_record(published, hub):
    published.stamp(CU132)
    status, said = published.release("--publish")
    assert status == 0, said
    assert f"left out   {CU132}  no gate record" in said
    assert not [path for path in contents(hub, "v1") if CU132 in path]
    assert tomllib.loads(published.lock_text())["left-out"] == {CU132: "no gate record"}


def test_keeps_an_older_torch_line_and_says_so(published, hub):
    repository = hub.store.repository("kernel", REPO_ID)
    old = {
        path.replace(CPU, OLDER_LINE): entry
        for path, entry in repository.resolve("v1").tree.items()
        if CPU in path
    }
    hub.store.commit(repository, "v1", "older line", None, old, [])
    published.next_commit("# fixed")
    status, said = published.release("--publish", "--keep", OLDER_LINE)
    assert status == 0, said
    assert f"kept       {OLDER_LINE}" in said
    on_branch = contents(hub, "v1")
    assert set(old) < set(on_branch)
    assert list(json.loads(on_branch["release.json"])["kept-from-older-releases"]) == [OLDER_LINE]

    said = refusal(published, "--publish", "--keep", CU132)
    assert f"--keep {CU132}: v1 has no such variant" in said
    published.build.joinpath(f"{CU130}.gate-2.13.0.json").unlink()
    said = refusal(published, "--publish", "--keep", CU130)
    assert f"--keep {CU130}: of the same torch line as this release" in said


def test_to_a_folder(ready, tmp_path):
    ready.pass_gate()
    store = tmp_path / "store"
    before = ready.snapshot()
    status, said = ready.release("--to", str(store))
    assert status == 0, said
    assert not store.exists()
    assert ready.snapshot() == before
    assert ready.release("--to", str(store), "--publish")[0] == 0
    assert (store / "v1" / "build" / CPU / "metadata.json").is_file()
    assert (store / "main" / "README.md").is_file()
    first = os.readlink(store / "v1")

    ready.commit()
    ready.stamp(CPU, code="# fixed")
    ready.pass_gate()
    assert ready.release("--to", str(store), "--publish")[0] == 0
    assert os.readlink(store / "v1") != first
    assert (store / "v1" / "build" / CPU / "__init__.py").read_text() == "# fixed"
    assert (store / first / "build" / CPU / "__init__.py").read_text() != "# fixed"


def test_the_real_card_names_what_a_loader_needs():
    """An older loader finds no variant (vllm-project/vllm-omni#6971), and an unlisted publisher
    needs a flag (huggingface/kernels#735): both are said."""
    config = read_build_toml(ROOT)
    card = render_card(ROOT, config)
    assert "`kernels` must be 0.17.2 or newer" in card
    assert f"version={config.general.version}, trust_remote_code=True)" in card
    assert f'@v{config.general.version}"' in card


class TestVerify:
    def test_what_was_published(self, published, hub):
        status, said = published.release("verify", REPO_ID)
        assert status == 0, said
        assert f"{CPU}: " in said
        assert published.release("verify", str(published.build / CPU))[0] == 1  # restamped since

    @pytest.mark.parametrize("what", ["_ops.py", "library", "unknown.py", "metadata.json"])
    def test_finds_a_tampered_file(self, ready, tmp_path, what):
        ready.pass_gate()
        store = tmp_path / "store"
        assert ready.release("--to", str(store), "--publish")[0] == 0
        assert ready.release("verify", str(store / "v1"))[0] == 0
        folder = store / "v1" / "build" / CPU
        path = ready.variant().library.name if what == "library" else what
        with (folder / path).open("ab") as stream:
            stream.write(b"\n")
        status, said = ready.release("verify", str(store / "v1"))
        assert status == 1
        assert path in said

    def test_finds_a_file_whose_digest_was_changed_with_it(self, ready, tmp_path):
        ready.pass_gate()
        assert ready.release("--to", str(tmp_path / "store"), "--publish")[0] == 0
        ready.stamp(CPU, code="import os  # evil")
        status, said = ready.release("verify", str(ready.build))
        assert status == 1
        assert "metadata.json is not that of the release of v1" in said

    def test_a_repository_that_was_changed_behind_our_back(self, published, hub):
        repository = hub.store.repository("kernel", REPO_ID)
        good = repository.branches["v1"]
        evil = hub.store.regular_entry(b"import os\n")
        path = f"build/{CPU}/_ops.py"
        hub.store.commit(repository, "v1", "evil", None, {path: evil}, [])
        assert published.release("verify", f"{REPO_ID}@{good}")[0] == 0
        status, said = published.release("verify", f"{REPO_ID}@v1")
        assert status == 1
        assert f"{CPU}: File hash mismatch for _ops.py" in said
        gone = [p for p in repository.resolve("v1").tree if CU130 in p]
        hub.store.commit(repository, "v1", "gone", None, {}, gone)
        assert f"{CU130}: released, but missing" in published.release("verify", REPO_ID)[1]
