"""Repositories of a small Hub: commits, branches, tags and blobs, kept in a folder."""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPO_TYPES = ("model", "dataset", "space", "kernel")


class HubError(Exception):
    """A refusal with the Hub's own vocabulary.

    Attributes:
        status: HTTP status code.
        code: the value of the ``X-Error-Code`` header, from which huggingface_hub picks its
            exception (RepoNotFound, RevisionNotFound, EntryNotFound, ...).
    """

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class TreeEntry:
    """One file of a commit."""

    blob: str  # sha256 of the content, its name in the blob folder; also the LFS object id
    git_oid: str  # sha1 as git computes it for a blob
    size: int  # bytes
    is_lfs: bool

    @property
    def etag(self) -> str:
        return self.blob if self.is_lfs else self.git_oid


@dataclass
class Commit:
    oid: str
    parent: str | None
    title: str
    date: str
    tree: dict[str, TreeEntry]


@dataclass
class Repository:
    repo_type: str
    repo_id: str
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch, a tag, ``refs/heads/<branch>`` or a commit id names."""
        name = revision
        for prefix in ("refs/heads/", "refs/tags/"):
            name = name.removeprefix(prefix)
        oid = self.branches.get(name) or self.tags.get(name) or name
        if oid not in self.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.commits[oid]

    def list_tree(
        self, commit: Commit, folder: str, recursive: bool
    ) -> tuple[list[str], dict[str, TreeEntry]]:
        """Folders and files under ``folder`` ("" is the root), all levels or the next one only."""
        prefix = f"{folder}/" if folder else ""
        folders, files = set(), {}
        for path, entry in sorted(commit.tree.items()):
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            depth = len(parts) - 1 if recursive else min(1, len(parts) - 1)
            folders.update(prefix + "/".join(parts[: i + 1]) for i in range(depth))
            if recursive or len(parts) == 1:
                files[path] = entry
        if folder and not folders and not files:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist in {self.repo_id}")
        return sorted(folders), files


class HubStore:
    """All repositories of the Hub, in a folder: ``blobs/<sha256>`` and ``state.json``.

    A commit is atomic: every operation is checked against a copy of the tree, and the branch moves
    only when all of them hold.
    """

    def __init__(self, folder: Path):
        self._blob_folder = Path(folder) / "blobs"
        self._blob_folder.mkdir(parents=True, exist_ok=True)
        self._state_path = Path(folder) / "state.json"
        self._repositories: dict[str, Repository] = {}
        if self._state_path.exists():
            self._load()

    # Blobs

    def put_blob(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        path = self._blob_folder / name
        if not path.exists():
            path.write_bytes(content)
        return name

    def has_blob(self, name: str) -> bool:
        return (self._blob_folder / name).exists()

    def read_blob(self, name: str) -> bytes:
        return (self._blob_folder / name).read_bytes()

    def regular_entry(self, content: bytes) -> TreeEntry:
        git_oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return TreeEntry(self.put_blob(content), git_oid, len(content), is_lfs=False)

    def lfs_entry(self, blob: str) -> TreeEntry:
        if not self.has_blob(blob):
            raise HubError(400, "BadRequest", f"LFS object {blob} was not uploaded")
        size = len(self.read_blob(blob))
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{blob}\nsize {size}\n"
        content = pointer.encode()
        git_oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return TreeEntry(blob, git_oid, size, is_lfs=True)

    # Repositories

    def create_repository(self, repo_type: str, repo_id: str) -> Repository:
        if repo_type not in REPO_TYPES:
            raise HubError(400, "BadRequest", f"repo type {repo_type!r} is none of {REPO_TYPES}")
        key = f"{repo_type}:{repo_id}"
        if key in self._repositories:
            raise HubError(409, "Conflict", "You already created this repo")
        repository = self._repositories[key] = Repository(repo_type, repo_id)
        attributes = b"*.so filter=lfs diff=lfs merge=lfs -text\n"
        tree = {".gitattributes": self.regular_entry(attributes)}
        self._append(repository, "main", None, tree, "initial commit")
        return repository

    def delete_repository(self, repo_type: str, repo_id: str) -> None:
        self.repository(repo_type, repo_id)
        del self._repositories[f"{repo_type}:{repo_id}"]
        self._save()

    def repository(self, repo_type: str, repo_id: str) -> Repository:
        key = f"{repo_type}:{repo_id}"
        if key not in self._repositories:
            raise HubError(404, "RepoNotFound", "Repository not found")
        return self._repositories[key]

    def create_ref(self, repository: Repository, kind: str, name: str, start: str) -> None:
        """Creates a branch or a tag (``kind``) at the commit that ``start`` names."""
        refs = repository.branches if kind == "branch" else repository.tags
        if name in refs:
            raise HubError(409, "Conflict", f"Reference already exists: {name}")
        refs[name] = repository.resolve(start).oid
        self._save()

    def delete_ref(self, repository: Repository, kind: str, name: str) -> None:
        refs = repository.branches if kind == "branch" else repository.tags
        if name not in refs:
            raise HubError(404, "RevisionNotFound", f"Reference does not exist: {name}")
        del refs[name]
        self._save()

    def commit(
        self,
        repository: Repository,
        branch: str,
        title: str,
        expected_parent: str | None,
        add: dict[str, TreeEntry],
        delete: Iterable[str],
    ) -> Commit:
        """Moves ``branch`` by one commit, or raises HubError and changes nothing.

        Args:
            expected_parent: if given, the commit that the branch must still stand at.
            add: new content by path.
            delete: paths of files, or of folders when they end in "/".
        """
        if branch not in repository.branches:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        parent = repository.commits[repository.branches[branch]]
        if expected_parent and expected_parent != parent.oid:
            raise HubError(
                412, "PreconditionFailed", f"{branch} is at {parent.oid}, not at {expected_parent}"
            )
        tree = dict(parent.tree)
        for path in delete:
            gone = [p for p in tree if p == path or (path.endswith("/") and p.startswith(path))]
            if not gone:
                raise HubError(404, "EntryNotFound", f"{path} does not exist on {branch}")
            for p in gone:
                del tree[p]
        tree.update(add)
        return self._append(repository, branch, parent.oid, tree, title)

    def add_folder(
        self, repo_type: str, repo_id: str, branch: str, folder: Path, path_in_repo: str
    ) -> Commit:
        """Commits every file under ``folder``, creating the branch from main if it is new.

        Shared objects become LFS files, as on the Hub.
        """
        repository = self.repository(repo_type, repo_id)
        if branch not in repository.branches:
            self.create_ref(repository, "branch", branch, "main")
        add = {}
        for path in sorted(Path(folder).rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            name = f"{path_in_repo}/{path.relative_to(folder).as_posix()}"
            content = path.read_bytes()
            is_lfs = path.suffix == ".so"
            add[name] = (
                self.lfs_entry(self.put_blob(content)) if is_lfs else self.regular_entry(content)
            )
        return self.commit(repository, branch, f"Add {path_in_repo}", None, add, [])

    def _append(
        self,
        repository: Repository,
        branch: str,
        parent: str | None,
        tree: dict[str, TreeEntry],
        title: str,
    ) -> Commit:
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        listing = [(path, entry.git_oid) for path, entry in sorted(tree.items())]
        identity = json.dumps([parent, listing, title, time.time_ns()])
        oid = hashlib.sha1(identity.encode()).hexdigest()
        repository.commits[oid] = Commit(oid, parent, title, date, tree)
        repository.branches[branch] = oid
        self._save()
        return repository.commits[oid]

    # State

    def _save(self) -> None:
        state = {key: asdict(repository) for key, repository in self._repositories.items()}
        self._state_path.write_text(json.dumps(state))

    def _load(self) -> None:
        for key, state in json.loads(self._state_path.read_text()).items():
            commits = {}
            for oid, commit in state.pop("commits").items():
                tree = {path: TreeEntry(**entry) for path, entry in commit.pop("tree").items()}
                commits[oid] = Commit(tree=tree, **commit)
            self._repositories[key] = Repository(commits=commits, **state)
