"""A release that is cut short: whatever ends it, the branch and the local build are whole."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from huggingface_hub import constants
from loopback_hub import HubError
from releasing import CPU, REPO_ID, contents, environment_of

from tools.release_collect import collect
from tools.release_target import FileId, FolderTarget, HubTarget, Move

WRITES = ("POST", "PUT", "DELETE")


@pytest.fixture
def second(ready, hub):
    """Version 1 is out, and its successor is built and gated."""
    ready.pass_gate()
    assert ready.release("--publish")[0] == 0
    ready.commit()
    ready.next_commit("# fixed\n" * 100)
    return ready


def writes_of(hub) -> list[tuple[str, str]]:
    return [(r.method, r.path) for r in hub.requests if r.method in WRITES]


class CutAfter:
    """Lets some writing requests through and acts on the next one."""

    def __init__(self, count: int, act) -> None:
        self.left = count
        self.act = act

    def __call__(self, method: str, path: str) -> None:
        if method in WRITES and not path.endswith("/objects/batch"):
            if self.left == 0:
                self.act()
            self.left -= 1


def cut() -> None:
    raise ConnectionAbortedError


@pytest.mark.parametrize("is_new", [True, False], ids=["new branch", "standing branch"])
def test_a_cut_connection_at_every_write(ready, hub, is_new):
    """Cut at each write in turn: the branch stands where it stood or holds the release, and a run
    without cuts ends as if nothing had happened."""
    ready.pass_gate()
    if not is_new:
        assert ready.release("--publish")[0] == 0
        ready.commit()
        ready.next_commit("# fixed\n" * 100)
    before, build = contents(hub, "v1"), ready.snapshot()
    for point in range(20):
        hub.intercept = CutAfter(point, cut)
        status, said = ready.release("--publish")
        finished = hub.intercept.left > 0
        hub.intercept = None
        if finished:
            break
        after = contents(hub, "v1")
        if status == 0:  # cut in the tidying, or retried by the client
            continue
        assert "the connection broke" in said or "run it again" in said
        assert after in (before, released(ready))
    assert status == 0, said
    assert point >= 3
    assert contents(hub, "v1") == released(ready)
    branches = set(hub.store.repository("kernel", REPO_ID).branches)
    assert branches == {"main", "v1"}
    assert ready.release()[1].count("nothing to do") == 1
    local = {k: v for k, v in ready.snapshot().items() if not k.startswith("releases/")}
    assert local == {k: v for k, v in build.items() if not k.startswith("releases/")}


def released(ready) -> dict[str, bytes]:
    """What a finished release leaves on the branch: its own files, and what main gave it."""
    files = collect(ready.root, ready.build).contents()
    files[".gitattributes"] = b"*.so filter=lfs diff=lfs merge=lfs -text\n"
    return {k: v if isinstance(v, bytes) else v.read_bytes() for k, v in sorted(files.items())}


@pytest.mark.parametrize("point", range(6))
def test_killed(second, hub, point):
    before, build = contents(hub, "v1"), second.snapshot()
    process = subprocess.Popen(
        second.release_command("--publish"),
        env=environment_of(hub),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    hub.intercept = CutAfter(point, lambda: os.kill(process.pid, signal.SIGKILL))
    said, _ = process.communicate(timeout=120)
    hub.intercept = None
    assert process.returncode in (0, -signal.SIGKILL), said
    assert contents(hub, "v1") in (before, released(second))
    if process.returncode != 0:
        assert second.snapshot() == build
    assert second.release("--publish")[0] == 0
    assert contents(hub, "v1") == released(second)


class TestRefusedByTheHub:
    def failure(self, ready, hub, *arguments: str) -> str:
        branches = dict(hub.store.repository("kernel", REPO_ID).branches)
        build = ready.snapshot()
        status, said = ready.release(*arguments)
        assert status == 1
        assert said.count("error: ") == 1
        assert "Traceback" not in said
        assert hub.store.repository("kernel", REPO_ID).branches == branches
        assert ready.snapshot() == build
        return said

    def test_no_token(self, second, hub, monkeypatch):
        monkeypatch.delenv("HF_TOKEN")
        said = self.failure(second, hub, "--publish")
        assert "401, no valid token" in said
        assert "run `hf auth login` or set HF_TOKEN" in said

    def test_a_wrong_token(self, second, hub, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_other")
        assert "401, no valid token" in self.failure(second, hub, "--publish")

    @pytest.mark.parametrize("why", ["token has no write access", "branch v1 is protected"])
    def test_forbidden(self, second, hub, why):
        def forbid(method: str, path: str) -> None:
            if method == "POST" and "/commit/v1" in path:
                raise HubError(403, "Forbidden", why)

        hub.intercept = forbid
        said = self.failure(second, hub, "--publish")
        assert f"403, the token may not write there ({why})" in said

    def test_a_wrong_repository(self, second, hub):
        said = self.failure(second, hub, "--publish", "--to", "org/other")
        assert "/kernels/org/other: there is no such repository of type kernel" in said
        assert "--create-repository" in said
        said = self.failure(second, hub, "--publish", "--to", "not/a/repository")
        assert "'not/a/repository' is no repository id" in said
        new = ("--to", "org/new", "--create-repository")
        status, said = second.release(*new)
        assert status == 0, said
        assert f"added      {CPU}" in said
        with pytest.raises(HubError, match="Repository not found"):
            contents(hub, "v1", "org/new")
        assert second.release("--publish", *new)[0] == 0
        assert contents(hub, "v1", "org/new") is not None

    def test_somebody_else_was_faster(self, second, hub):
        repository = hub.store.repository("kernel", REPO_ID)
        mine = hub.store.regular_entry(b"theirs")

        def move_first(method: str, path: str) -> None:
            if method == "POST" and "/commit/v1" in path:
                hub.intercept = None
                hub.store.commit(repository, "v1", "theirs", None, {"x": mine}, [])

        hub.intercept = move_first
        status, said = second.release("--publish")
        assert status == 1
        assert "the branch moved meanwhile" in said
        assert contents(hub, "v1")["x"] == b"theirs"

    def test_a_server_that_fails(self, second, hub):
        def fail(method: str, path: str) -> None:
            if method == "POST" and "/commit/v1" in path:
                raise HubError(500, "Internal", "out of order")

        hub.intercept = fail
        said = self.failure(second, hub, "--publish")
        assert "500, out of order" in said
        assert "run it again" in said

    def test_nobody_there(self, second, hub, monkeypatch):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        status, said = second.release("--publish")
        assert status == 1
        assert "the connection broke" in said


class TestDiskFull:
    """Half way through writing: a limit on the size of files stands for a full disk."""

    def run(self, ready, limit: int, *arguments: str) -> subprocess.CompletedProcess:
        def shrink() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = ready.release_command(*arguments)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            command, env=environment, preexec_fn=shrink, capture_output=True, text=True
        )

    def test_of_a_folder(self, ready, tmp_path):
        ready.pass_gate()
        store = tmp_path / "store"
        assert ready.release("--publish", "--to", str(store))[0] == 0
        ready.commit()
        ready.next_commit("# fixed\n" * 4000)
        before = os.readlink(store / "v1")
        build = ready.snapshot()
        result = self.run(ready, 20_000, "--publish", "--to", str(store))
        assert result.returncode == 1
        assert "File too large; v1 stands where it stood" in result.stderr
        assert "Traceback" not in result.stderr
        assert os.readlink(store / "v1") == before
        assert not [p for p in store.iterdir() if p.name.startswith(".incoming")]
        assert ready.snapshot() == build
        assert ready.release("--publish", "--to", str(store))[0] == 0
        assert (store / "v1" / "build" / CPU / "__init__.py").read_text() == "# fixed\n" * 4000

    def test_of_the_record(self, ready, hub, monkeypatch):
        """The branch has moved; only the record in the repository is missing."""
        ready.pass_gate()
        (ready.root / "releases").write_text("in the way")
        ready.commit()
        ready.stamp(CPU)
        ready.pass_gate()
        status, said = ready.release("--publish")
        assert status == 1
        assert "the branch is published, running the release again writes this file" in said
        (ready.root / "releases").unlink()
        ready.git("rm", "-q", "--cached", "releases")
        built = ready.variant().commit
        ready.commit()
        assert ready.release("--publish", "--commit", built)[0] == 0
        assert ready.lock_text() is not None


def run_and_die_at(count: int, change, folder) -> int:
    """Runs `change` in a process of its own, which kills itself before its `count`-th change of a
    file below `folder`; returns that process's status, 0 when it came to its end."""
    child = os.fork()
    if child == 0:
        seen = 0

        def die(event: str, arguments: tuple) -> None:
            nonlocal seen
            writes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink")
            writes |= event == "open" and "w" in str(arguments[1])
            if writes and any(str(folder) in str(argument) for argument in arguments):
                seen += 1
                if seen > count:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(die)
            status = change()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_folder_release_that_is_killed_at_every_step(ready, tmp_path):
    """Whoever reads the folder finds the old release or the new one; the next run ends it."""
    ready.pass_gate()
    store = tmp_path / "store"
    assert ready.release("--publish", "--to", str(store))[0] == 0
    ready.commit()
    ready.next_commit("# fixed\n")
    build = ready.snapshot()
    heads = dict(FolderTarget(store).branches())
    whole = {head: FolderTarget(store).files(head) for head in heads.values()}

    points, states = 0, set()
    while True:
        status = run_and_die_at(
            points, lambda: ready.release("--publish", "--to", str(store))[0], store
        )
        now = FolderTarget(store).branches()
        assert set(now) == set(heads)
        files = FolderTarget(store).files(now["v1"])
        if now["v1"] == heads["v1"]:
            assert files == whole[now["v1"]]
        else:
            released_files = {k: v for k, v in released(ready).items() if k != ".gitattributes"}
            assert {k: v.sha256 for k, v in files.items()} == {
                k: FileId.of(v).sha256 for k, v in released_files.items()
            }
        states.add(now["v1"])
        local = {k: v for k, v in ready.snapshot().items() if not k.startswith("releases/")}
        assert local == {k: v for k, v in build.items() if not k.startswith("releases/")}
        if status == 0:
            break
        assert status == -signal.SIGKILL
        points += 1
    assert points > 10
    assert len(states) == 2
    assert ready.release("--to", str(store))[1].count("nothing to do") == 1
    assert {path.name for path in store.iterdir()} == {".commits", "main", "v1"}


def test_a_killed_folder_release_leaves_nothing_that_is_seen(tmp_path):
    target = FolderTarget(tmp_path)
    target.move(Move("main", "first", {"a": b"1"}, [], None))
    (tmp_path / ".incoming-1" / "build").mkdir(parents=True)
    head = target.branches()["main"]
    assert list(target.branches()) == ["main"]
    target.move(Move("v1", "next", {"b": b"2"}, ["a"], None))
    assert set(target.files(target.branches()["v1"])) == {"b"}
    assert target.branches()["main"] == head


def test_a_folder_that_holds_other_things(ready, tmp_path):
    ready.pass_gate()
    (tmp_path / "mine").mkdir()
    status, said = ready.release("--publish", "--to", str(tmp_path))
    assert status == 1
    assert "not made by a release; choose a folder of its own" in said


def test_a_version_branch_is_never_there_without_its_files(hub):
    """`kernels versions` ends with an error on a version branch that has no build/."""
    seen = []

    def look(method: str, path: str) -> None:
        branches = hub.store.repository("kernel", REPO_ID).branches
        seen.append("v1" in branches and "build/x" not in contents(hub, "v1"))

    hub.intercept = look
    HubTarget(REPO_ID).move(Move("v1", "new", {"build/x": b"1"}, [], None))
    assert contents(hub, "v1")["build/x"] == b"1"
    assert len(seen) > 3
    assert not any(seen)
