"""The loopback Hub itself: what huggingface_hub's client does with it, and what it must refuse."""

import base64
import hashlib
import json
import sys
import textwrap
import urllib.error
import urllib.request

import processes
import pytest
from loopback_hub import HubError, HubStore, LoopbackHub

TOKEN = "hf_token"


@pytest.fixture
def hub(tmp_path):
    with LoopbackHub(tmp_path / "hub", token=TOKEN) as hub:
        yield hub


@pytest.fixture
def repository(hub):
    return hub.store.create_repository("kernel", "acme/kernel")


def request(hub, method: str, path: str, content: bytes = b"", **headers) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    asked = urllib.request.Request(hub.url + path, content or None, headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def commit(hub, branch: str, *operations: dict, **header: str) -> tuple[int, bytes]:
    lines = [{"key": "header", "value": {"summary": "test", **header}}, *operations]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    return request(hub, "POST", f"/api/kernels/acme/kernel/commit/{branch}", content)


def add(path: str, content: bytes) -> dict:
    encoded = base64.b64encode(content).decode()
    return {"key": "file", "value": {"path": path, "content": encoded, "encoding": "base64"}}


def test_client_uploads_lists_and_downloads(hub, tmp_path):
    """Regular and LFS files, folders replaced by pattern, branches, tags, history."""
    code = f"""
        from pathlib import Path
        from huggingface_hub import HfApi
        api, where = HfApi(), dict(repo_id="acme/kernel", repo_type="kernel")
        api.create_repo(**where)
        api.create_repo(**where, exist_ok=True)
        api.create_branch(**where, branch="v1")
        folder = Path({str(tmp_path)!r}) / "build"
        (folder / "variant").mkdir(parents=True)
        (folder / "variant" / "module.so").write_bytes(bytes(range(256)) * 100)
        (folder / "variant" / "__init__.py").write_text("first = 1")
        upload = dict(path_in_repo="build", revision="v1", delete_patterns="*")
        api.upload_folder(**where, folder_path=folder, **upload)
        (folder / "variant" / "__init__.py").rename(folder / "variant" / "renamed.py")
        api.upload_folder(**where, folder_path=folder, **upload)
        assert set(api.list_repo_files(**where, revision="v1")) == {{
            ".gitattributes", "build/variant/module.so", "build/variant/renamed.py"
        }}
        path = api.hf_hub_download(**where, filename="build/variant/module.so", revision="v1")
        assert Path(path).read_bytes() == bytes(range(256)) * 100
        api.create_tag(**where, tag="v1.0", revision="v1")
        refs = api.list_repo_refs(**where)
        assert [b.name for b in refs.branches] == ["main", "v1"]
        assert refs.tags[0].target_commit == refs.branches[1].target_commit
        assert len(api.list_repo_commits(**where, revision="v1")) == 3
        api.delete_folder(**where, path_in_repo="build", revision="v1")
        assert api.list_repo_files(**where, revision="v1.0") != api.list_repo_files(
            **where, revision="v1"
        )
        api.delete_branch(**where, branch="v1")
        api.delete_tag(**where, tag="v1.0")
        api.delete_repo(**where)
        assert not api.repo_exists(**where)
    """
    environment = {"HF_HUB_OFFLINE": None, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = processes.run(command, environment={**hub.environment(), **environment})
    assert result.returncode == 0, result.stderr
    assert [r for r in hub.requests if r.method == "PUT"], "the shared object went through LFS"


def test_commit_is_all_or_nothing(hub, repository):
    """One bad operation, and the good ones beside it are not seen either."""
    before = repository.branches["main"]
    missing = {"path": "b.so", "algo": "sha256", "oid": "0" * 64, "size": 1}
    for bad in (
        {"key": "lfsFile", "value": missing},
        {"key": "deletedFile", "value": {"path": "no-such-file"}},
        {"key": "renamedFile", "value": {"path": "a"}},
    ):
        status, _ = commit(hub, "main", add("a.txt", b"a"), bad)
        assert status in (400, 404)
        assert repository.branches["main"] == before


def test_commit_on_a_moved_branch_is_refused(hub, repository):
    parent = repository.branches["main"]
    assert commit(hub, "main", add("a.txt", b"a"), parentCommit=parent)[0] == 200
    status, answer = commit(hub, "main", add("b.txt", b"b"), parentCommit=parent)
    assert status == 412
    assert b"main is at" in answer
    assert "b.txt" not in repository.resolve("main").tree


def test_lfs_content_must_match_its_name(hub):
    oid = hashlib.sha256(b"right").hexdigest()
    assert request(hub, "PUT", f"/lfs/{oid}", b"wrong")[0] == 422
    assert not hub.store.has_blob(oid)
    assert request(hub, "PUT", f"/lfs/{oid}", b"right")[0] == 200


def test_resumed_download(hub, repository):
    commit(hub, "main", add("numbers", b"0123456789"))
    path = "/kernels/acme/kernel/resolve/main/numbers"
    assert request(hub, "GET", path, Range="bytes=4-") == (206, b"456789")
    assert request(hub, "GET", path, Range="bytes=4-5") == (206, b"45")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/repos/create"),
        ("POST", "/api/kernels/acme/kernel/commit/main"),
        ("POST", "/api/kernels/acme/kernel/branch/v1"),
        ("POST", "/api/kernels/acme/kernel/preupload/main"),
    ],
)
def test_writing_needs_the_token(method, path, hub, repository):
    assert request(hub, method, path, b"{}", Authorization="Bearer other")[0] == 401


def test_unknown_names(hub, repository):
    for path, code in {
        "/api/kernels/acme/other": b"Repository not found",
        "/api/kernels/acme/kernel/revision/v9": b"Invalid rev id: v9",
        "/api/kernels/acme/kernel/tree/main/build": b"build does not exist",
        "/kernels/acme/kernel/resolve/main/nothing": b"nothing does not exist",
    }.items():
        status, answer = request(hub, "GET", path)
        assert status == 404
        assert code in answer


def test_store_survives_a_restart(tmp_path):
    store = HubStore(tmp_path)
    repository = store.create_repository("kernel", "acme/kernel")
    tree = {"a.txt": store.regular_entry(b"a")}
    store.commit(repository, "main", "add", None, tree, [])
    again = HubStore(tmp_path).repository("kernel", "acme/kernel")
    assert again == repository
    with pytest.raises(HubError, match="You already created this repo"):
        HubStore(tmp_path).create_repository("kernel", "acme/kernel")
