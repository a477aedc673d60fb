"""The HTTP side of the small Hub: routes and the JSON that huggingface_hub expects."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from loopback_hub.store import Commit, HubError, HubStore, Repository, TreeEntry

_USER = "tester"
_TYPES = {"models": "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}
_URL_PREFIX = {"model": "", "dataset": "datasets/", "space": "spaces/", "kernel": "kernels/"}


@dataclass(frozen=True)
class Request:
    """One served request, for tests that assert what went over the wire."""

    method: str
    path: str
    status: int


class LoopbackHub:
    """The server. Use it as a context manager; it listens from construction on.

    Args:
        folder: where the store lives.
        port: 0 picks a free one.
        trusted_publishers: organisations whose kernels load without a trust flag.
        token: if given, writing needs ``Authorization: Bearer <token>``.
        lfs_suffixes: files that clients must upload through LFS. An installed hf-xet would answer
            with its own protocol, which this server does not speak; ``environment()`` turns it off.

    Attributes:
        intercept: called with method and path before a request is served. It may raise HubError to
            refuse the request, or ConnectionAbortedError to cut the connection without an answer.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        trusted_publishers: Iterable[str] = (),
        token: str | None = None,
        lfs_suffixes: tuple[str, ...] = (".so",),
    ):
        self.store = HubStore(folder)
        self.trusted_publishers = set(trusted_publishers)
        self.token = token
        self.lfs_suffixes = lfs_suffixes
        self.requests: list[Request] = []
        self.intercept: Callable[[str, str], None] | None = None
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self) -> dict[str, str]:
        """The variables that make a fresh Python talk to this server."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}

    def join(self) -> None:
        self._thread.join()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    @property
    def store(self) -> HubStore:
        return self.server.hub.store

    def log_message(self, format, *args):  # the requests list is the log
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.content = self._read_body()
        try:
            if self.hub.intercept is not None:
                self.hub.intercept(self.command, url.path)
            with self.hub.lock:
                self._route(url.path)
        except ConnectionAbortedError:
            self.close_connection = True
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self._reply(error.status, {"error": str(error)}, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _route(self, path: str) -> None:
        for methods, pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in methods.split():
                handler(self, *[unquote(group or "") for group in match.groups()])
                return
        raise HubError(404, "NotFound", f"no route for {self.command} {path}")

    # Account and publishers

    def whoami(self) -> None:
        self._require_token()
        account = {"type": "user", "name": _USER, "fullname": _USER, "orgs": []}
        self._reply(200, {**account, "auth": {"type": "access_token"}})

    def organization(self, name: str) -> None:
        trusted = name in self.hub.trusted_publishers
        overview = {"name": name, "fullname": name, "avatarUrl": ""}
        self._reply(200, {**overview, "trustedKernelPublisher": trusted})

    def validate_yaml(self) -> None:
        self._reply(200, {"errors": [], "warnings": []})

    # Repositories and refs

    def create_repository(self) -> None:
        self._require_token()
        repo_type, repo_id = self._named_repository()
        url = f"{self.hub.url}/{_URL_PREFIX.get(repo_type, '')}{repo_id}"
        try:
            self.store.create_repository(repo_type, repo_id)
        except HubError as error:
            if error.status != 409:
                raise
            headers = {"X-Error-Message": str(error)}
            self._reply(409, {"error": str(error), "url": url}, headers)
            return
        self._reply(200, {"url": url, "name": repo_id})

    def delete_repository(self) -> None:
        self._require_token()
        self.store.delete_repository(*self._named_repository())
        self._reply(200, {})

    def repository_info(self, types: str, repo_id: str, revision: str) -> None:
        commit = self._repository(types, repo_id).resolve(revision or "main")
        info = {
            "_id": repo_id,
            "id": repo_id,
            "author": repo_id.split("/")[0],
            "sha": commit.oid,
            "private": False,
            "gated": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": commit.date,
            "createdAt": commit.date,
            "siblings": [{"rfilename": path} for path in sorted(commit.tree)],
        }
        self._reply(200, info)

    def refs(self, types: str, repo_id: str) -> None:
        repository = self._repository(types, repo_id)

        def listing(refs: dict[str, str], kind: str) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid}
                for name, oid in sorted(refs.items())
            ]

        branches, tags = listing(repository.branches, "heads"), listing(repository.tags, "tags")
        self._reply(200, {"branches": branches, "tags": tags, "converts": []})

    def create_branch(self, types: str, repo_id: str, name: str) -> None:
        self._require_token()
        start = json.loads(self.content or b"{}").get("startingPoint") or "main"
        self.store.create_ref(self._repository(types, repo_id), "branch", name, start)
        self._reply(200, {})

    def create_tag(self, types: str, repo_id: str, start: str) -> None:
        self._require_token()
        name = json.loads(self.content)["tag"]
        self.store.create_ref(self._repository(types, repo_id), "tag", name, start)
        self._reply(200, {})

    def delete_ref(self, types: str, repo_id: str, kind: str, name: str) -> None:
        self._require_token()
        self.store.delete_ref(self._repository(types, repo_id), kind, name)
        self._reply(200, {})

    def history(self, types: str, repo_id: str, revision: str) -> None:
        repository = self._repository(types, repo_id)
        commits, oid = [], repository.resolve(revision).oid
        while oid:
            commit: Commit = repository.commits[oid]
            entry = {"id": oid, "title": commit.title, "message": "", "authors": []}
            commits.append({**entry, "date": commit.date})
            oid = commit.parent
        self._reply(200, commits)

    # Trees and files

    def tree(self, types: str, repo_id: str, revision: str, folder: str) -> None:
        repository = self._repository(types, repo_id)
        commit = repository.resolve(revision)
        recursive = self.query.get("recursive", "false").lower() in ("true", "1")
        folders, files = repository.list_tree(commit, folder.strip("/"), recursive)
        items = [
            {"type": "directory", "path": path, "oid": _folder_oid(path), "size": 0}
            for path in folders
        ]
        for path, entry in files.items():
            item = {"type": "file", "path": path, "size": entry.size, "oid": entry.git_oid}
            if entry.is_lfs:
                item["lfs"] = {"oid": entry.blob, "size": entry.size, "pointerSize": 130}
            items.append(item)
        self._reply(200, items, {"X-Repo-Commit": commit.oid})

    def resolve_file(self, types: str, repo_id: str, revision: str, path: str) -> None:
        commit = self._repository(types or "models", repo_id).resolve(revision)
        entry = commit.tree.get(path)
        if entry is None:
            raise HubError(404, "EntryNotFound", f"{path} does not exist at {revision}")
        content, status = self.store.read_blob(entry.blob), 200
        headers = {
            "X-Repo-Commit": commit.oid,
            "ETag": f'"{entry.etag}"',
            "Accept-Ranges": "bytes",
        }
        if entry.is_lfs:
            headers["X-Linked-Etag"] = f'"{entry.blob}"'
            headers["X-Linked-Size"] = str(entry.size)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:  # a resumed download
            first, last = int(span[1]), int(span[2] or entry.size - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{entry.size}"
            content, status = content[first : last + 1], 206
        self._reply(status, content, headers)

    # Uploads

    def preupload(self, types: str, repo_id: str, revision: str) -> None:
        self._require_token()
        commit = self._repository(types, repo_id).resolve(revision)
        files = []
        for file in json.loads(self.content)["files"]:
            known = commit.tree.get(file["path"])
            is_lfs = file["path"].endswith(self.hub.lfs_suffixes)
            files.append(
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if is_lfs else "regular",
                    "oid": known.etag if known else None,
                }
            )
        self._reply(200, {"commitOid": commit.oid, "files": files})

    def lfs_batch(self, types: str, repo_id: str) -> None:
        self._repository(types or "models", repo_id)
        request = json.loads(self.content)
        objects = []
        for wanted in request["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if request["operation"] == "upload" and not self.store.has_blob(wanted["oid"]):
                href = f"{self.hub.url}/lfs/{wanted['oid']}"
                answer["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(answer)
        self._reply(200, {"transfer": "basic", "objects": objects})

    def lfs_upload(self, oid: str) -> None:
        if hashlib.sha256(self.content).hexdigest() != oid:
            raise HubError(422, "BadRequest", f"the content's sha256 is not {oid}")
        self.store.put_blob(self.content)
        self._reply(200, {})

    def lfs_verify(self, oid: str) -> None:
        if not self.store.has_blob(oid):
            raise HubError(404, "EntryNotFound", f"LFS object {oid} was not uploaded")
        self._reply(200, {})

    def commit(self, types: str, repo_id: str, branch: str) -> None:
        self._require_token()
        repository = self._repository(types, repo_id)
        header: dict[str, str] = {}
        add: dict[str, TreeEntry] = {}
        delete: list[str] = []
        for line in self.content.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
            elif key == "file":
                add[value["path"]] = self.store.regular_entry(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                add[value["path"]] = self.store.lfs_entry(value["oid"])
            elif key == "deletedFile":
                delete.append(value["path"])
            elif key == "deletedFolder":
                delete.append(value["path"].rstrip("/") + "/")
            else:
                raise HubError(400, "BadRequest", f"unknown operation {key!r} in a commit")
        title, parent = header.get("summary", ""), header.get("parentCommit")
        commit = self.store.commit(repository, branch, title, parent, add, delete)
        url = f"{self.hub.url}/{_URL_PREFIX[repository.repo_type]}{repo_id}/commit/{commit.oid}"
        self._reply(200, {"success": True, "commitOid": commit.oid, "commitUrl": url})

    # Plumbing

    def _repository(self, types: str, repo_id: str) -> Repository:
        return self.store.repository(_TYPES[types], repo_id)

    def _named_repository(self) -> tuple[str, str]:
        request = json.loads(self.content)
        owner = request.get("organization") or _USER
        return request.get("type") or "model", f"{owner}/{request['name']}"

    def _require_token(self) -> None:
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise HubError(401, "Unauthorized", "Invalid token")

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while True:
            size = int(self.rfile.readline().split(b";")[0], 16)
            body += self.rfile.read(size)
            self.rfile.readline()
            if size == 0:
                return body

    def _reply(self, status: int, body, headers: dict[str, str] | None = None) -> None:
        is_file = isinstance(body, bytes)
        content = body if is_file else json.dumps(body).encode()
        self.hub.requests.append(Request(self.command, self.path, status))
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if is_file else "text/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _folder_oid(path: str) -> str:
    return hashlib.sha1(path.encode()).hexdigest()


_REPO = r"/api/(models|datasets|spaces|kernels)/([^/]+/[^/]+)"
_FILES = r"/(?:(datasets|spaces|kernels)/)?([^/]+/[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("GET", r"/api/organizations/([^/]+)/overview", _Handler.organization),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", r"/api/repos/create", _Handler.create_repository),
    ("DELETE", r"/api/repos/delete", _Handler.delete_repository),
    ("GET", _REPO + r"(?:/revision/([^/]+))?", _Handler.repository_info),
    ("GET", _REPO + r"/refs", _Handler.refs),
    ("POST", _REPO + r"/branch/([^/]+)", _Handler.create_branch),
    ("POST", _REPO + r"/tag/([^/]+)", _Handler.create_tag),
    ("DELETE", _REPO + r"/(branch|tag)/([^/]+)", _Handler.delete_ref),
    ("GET", _REPO + r"/commits/([^/]+)", _Handler.history),
    ("GET", _REPO + r"/tree/([^/]+)(?:/(.*))?", _Handler.tree),
    ("GET HEAD", _FILES + r"/resolve/([^/]+)/(.+)", _Handler.resolve_file),
    ("POST", _REPO + r"/preupload/([^/]+)", _Handler.preupload),
    ("POST", _FILES + r"\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", _Handler.lfs_upload),
    ("POST", r"/lfs/([0-9a-f]{64})/verify", _Handler.lfs_verify),
    ("POST", _REPO + r"/commit/([^/]+)", _Handler.commit),
]
