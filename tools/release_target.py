"""Where a release goes: branches of a Hub repository, or of a folder.

Both targets move a branch in one step that happens wholly or not at all. Nobody ever finds a branch
with part of a release, whatever ends the process or the connection.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BuildError

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Content = Path | bytes


@dataclass(frozen=True)
class FileId:
    """What tells one file from another: git's id, or the sha256 where the Hub keeps that."""

    size: int
    git_oid: str | None
    sha256: str | None

    @classmethod
    def of(cls, content: Content) -> FileId:
        data = content if isinstance(content, bytes) else content.read_bytes()
        git_oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return cls(len(data), git_oid, hashlib.sha256(data).hexdigest())

    def same_as(self, other: FileId) -> bool:
        if self.sha256 is not None and other.sha256 is not None:
            return self.sha256 == other.sha256
        return self.git_oid == other.git_oid


@dataclass(frozen=True)
class Move:
    """One change of one branch."""

    branch: str
    title: str
    add: dict[str, Content]
    delete: list[str]
    expected_head: str | None  # where the branch stood when the change was made up


class Target(ABC):
    """Branches with files, which move atomically."""

    @abstractmethod
    def address(self) -> dict[str, str]:
        """What the record of a release says of it. No path of this machine."""

    @abstractmethod
    def branches(self) -> dict[str, str]:
        """The commit of every branch."""

    @abstractmethod
    def files(self, commit: str) -> dict[str, FileId]:
        """Every file of a commit."""

    @abstractmethod
    def read(self, commit: str, path: str) -> bytes:
        """One file of a commit."""

    @abstractmethod
    def move(self, move: Move) -> str:
        """Makes the change and returns the branch's new commit. A new branch starts from main."""

    def tidy(self, branch: str) -> None:  # noqa: B027  # most targets leave nothing behind
        """Removes what a run that was cut short left beside the branch."""


class HubTarget(Target):
    """A repository of type kernel on a Hub; endpoint and token are huggingface_hub's usual ones."""

    def __init__(self, repo_id: str, endpoint: str | None = None) -> None:
        from huggingface_hub import HfApi

        self.repo_id = repo_id
        self._api = HfApi(endpoint=endpoint, library_name="flash-attn-norm-release")
        self._where = {"repo_id": repo_id, "repo_type": "kernel"}
        self.may_be_missing = False  # then a dry run takes it for an empty one

    def address(self) -> dict[str, str]:
        return {"to": self.repo_id, "endpoint": self._api.endpoint}

    def __str__(self) -> str:
        return f"{self._api.endpoint}/kernels/{self.repo_id}"

    def create_repository(self) -> None:
        with self._explained():
            self._api.create_repo(**self._where, exist_ok=True)

    def branches(self) -> dict[str, str]:
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._explained():
            try:
                refs = self._api.list_repo_refs(**self._where)
            except RepositoryNotFoundError:
                if self.may_be_missing:
                    return {}
                raise
        return {branch.name: branch.target_commit for branch in refs.branches}

    def files(self, commit: str) -> dict[str, FileId]:
        from huggingface_hub.hf_api import RepoFile

        with self._explained():
            entries = list(self._api.list_repo_tree(**self._where, revision=commit, recursive=True))
        return {
            entry.path: FileId(
                entry.size,
                entry.blob_id if entry.lfs is None else None,
                entry.lfs.sha256 if entry.lfs is not None else None,
            )
            for entry in entries
            if isinstance(entry, RepoFile)
        }

    def read(self, commit: str, path: str) -> bytes:
        with self._explained():
            return Path(
                self._api.hf_hub_download(**self._where, filename=path, revision=commit)
            ).read_bytes()

    def download(self, revision: str, folder: Path) -> Path:
        """Fetches the variants of a revision into `folder`."""
        with self._explained():
            return Path(
                self._api.snapshot_download(
                    **self._where, revision=revision, allow_patterns="build/*", local_dir=folder
                )
            )

    def move(self, move: Move) -> str:
        with self._explained():
            branches = self.branches()
            if move.branch in branches:
                return self._commit(move, move.branch, move.expected_head)
            return self._create(move, branches)

    def _create(self, move: Move, branches: dict[str, str]) -> str:
        """A new branch appears with all its files, or not at all.

        The commit is made on a branch that no loader takes for a version; then the new branch
        starts at it.
        """
        staging = _staging(move.branch)
        if staging in branches:  # left by a run that was cut short
            self._api.delete_branch(**self._where, branch=staging)
        self._api.create_branch(**self._where, branch=staging, revision=branches["main"])
        commit = self._commit(move, staging, branches["main"])
        self._api.create_branch(**self._where, branch=move.branch, revision=commit)
        return commit

    def tidy(self, branch: str) -> None:
        with self._explained():
            if _staging(branch) in self.branches():
                self._api.delete_branch(**self._where, branch=_staging(branch))

    def _commit(self, move: Move, branch: str, parent: str | None) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        operations = [
            CommitOperationAdd(path, content) for path, content in sorted(move.add.items())
        ]
        operations += [CommitOperationDelete(path) for path in sorted(move.delete)]
        result = self._api.create_commit(
            **self._where,
            operations=operations,
            commit_message=move.title,
            revision=branch,
            parent_commit=parent,
        )
        return result.oid

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the client raises into one line that says what to do.

        The client wraps some failures of an upload, so the causes are looked at too.
        """
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                text = self._say(cause)
                if text is not None:
                    raise BuildError(text) from None
                cause = cause.__cause__
            raise

    def _say(self, error: BaseException) -> str | None:
        """What an exception of the client means to its user; None for one that is no failure of
        the network, the disk or the settings."""
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            return f"{self.repo_id!r} is no repository id: {error}"
        if isinstance(error, errors.LocalTokenNotFoundError):
            return f"{self}: no token; run `hf auth login` or set HF_TOKEN"
        if isinstance(error, errors.HfHubHTTPError):
            return self._explain(error)
        if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
            return f"{self}: {error}"
        name = type(error).__name__
        if isinstance(error, ValueError):  # such as a card whose header the Hub does not accept
            return f"{self}: {error}"
        if isinstance(error, OSError):
            return f"{self}: {name}: {error}; {_RERUN}"
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore"):
            return f"{self}: the connection broke ({name}); {_RERUN}"
        return None

    def _explain(self, error: HfHubHTTPError) -> str:
        from huggingface_hub import errors

        status = error.response.status_code
        said = (error.response.headers.get("X-Error-Message") or str(error)).strip()
        if status == 401:  # also the Hub's answer for a repository that it does not show
            return (
                f"{self}: 401, no valid token, or no repository of type kernel that it may see "
                f"({said}); run `hf auth login` or set HF_TOKEN, and check the repository's id"
            )
        if status == 403:
            return f"{self}: 403, the token may not write there ({said})"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{self}: there is no such repository of type kernel, or the token may not see it; "
                "check general.hub.repo-id in build.toml, or say --create-repository"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self}: no such branch or commit ({said})"
        if status in (409, 412):
            return f"{self}: the branch moved meanwhile ({said}); run it again to see what changed"
        return f"{self}: {status}, {said}; {_RERUN}"


def _staging(branch: str) -> str:
    return f"release-{branch}"


_RERUN = "the branch stands where it stood or where it should; run it again"


class FolderTarget(Target):
    """A folder with an entry for each branch: a link to a commit, replaced in one step.

    FOLDER/v1/build is what `kernels` calls a local kernel repository.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def address(self) -> dict[str, str]:
        return {"to": f"folder {self.folder.name}"}

    def __str__(self) -> str:
        return str(self.folder)

    def branches(self) -> dict[str, str]:
        if not self.folder.exists():
            return {}
        found = {}
        for entry in sorted(self.folder.iterdir()):
            if entry.name.startswith("."):
                continue
            if not entry.is_symlink():
                raise BuildError(f"{entry}: not made by a release; choose a folder of its own")
            found[entry.name] = Path(os.readlink(entry)).name
        return found

    def files(self, commit: str) -> dict[str, FileId]:
        root = self._commit_folder(commit)
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {path.relative_to(root).as_posix(): FileId.of(path) for path in sorted(paths)}

    def read(self, commit: str, path: str) -> bytes:
        return (self._commit_folder(commit) / path).read_bytes()

    def move(self, move: Move) -> str:
        branches = self.branches()
        if branches.get(move.branch) != move.expected_head:
            raise BuildError(f"{self}: {move.branch} moved meanwhile; run it again")
        parent = branches.get(move.branch) or branches.get("main")
        incoming = self.folder / f".incoming-{os.getpid()}"
        try:
            self._write(incoming, move, parent)
            commit = _listing_id(incoming)
            target = self._commit_folder(commit)
            target.parent.mkdir(exist_ok=True)
            if not target.exists():
                incoming.rename(target)
            link = self.folder / f".link-{os.getpid()}"
            link.unlink(missing_ok=True)
            link.symlink_to(target.relative_to(self.folder))
            link.replace(self.folder / move.branch)
        except OSError as error:
            raise BuildError(f"{self}: {error}; {move.branch} stands where it stood") from None
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        return commit

    def tidy(self, branch: str) -> None:
        for entry in self.folder.iterdir():
            name, _, process = entry.name.rpartition("-")
            if name in (".incoming", ".link") and not _is_running(int(process)):
                if entry.is_symlink():
                    entry.unlink()
                else:
                    shutil.rmtree(entry, ignore_errors=True)

    def _write(self, incoming: Path, move: Move, parent: str | None) -> None:
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
        if parent is not None:
            shutil.copytree(self._commit_folder(parent), incoming, dirs_exist_ok=True)
        for path in move.delete:
            (incoming / path).unlink()
        for path, content in move.add.items():
            target = incoming / path
            target.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.read_bytes()
            target.write_bytes(data)
        for folder in sorted(incoming.rglob("*"), reverse=True):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _commit_folder(self, commit: str) -> Path:
        return self.folder / ".commits" / commit


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _listing_id(folder: Path) -> str:
    """The same files give the same commit."""
    digest = hashlib.sha1()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            digest.update(f"{FileId.of(path).sha256} {name}\n".encode())
    return digest.hexdigest()


def open_target(text: str) -> Target:
    """`org/name` is a Hub repository; a path that starts with /, ./ or ../ is a folder."""
    if text.startswith(("/", "./", "../", "~")):
        return FolderTarget(Path(text).expanduser().resolve())
    return HubTarget(text)
