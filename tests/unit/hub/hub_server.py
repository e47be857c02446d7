"""A small hub on this machine: the metadata and file routes that the hub's own client uses, and a log of what it asked.

    with HubServer(folder) as hub:      # folder/owner/name/files are the repositories
        environment["HF_ENDPOINT"] = hub.endpoint

Datasets are in folder/datasets/owner/name; another branch of a repository is beside it in name@branch, quoted.

`gated` maps a repository to the tokens that its files accept (its listing is open, as on the real hub); the token
`EXPIRED` is accepted nowhere; `broken` makes every answer a 500; `announced_bytes` makes the listing lie about a file's
size; `cuts` maps a file to the bytes after which each successive GET of it is cut off; `stall` names a file whose GET
sends half and then waits until the client is gone, after setting `stalled`. `large` names the files that the hub knows
by their SHA-256, as all files above 10 MB; `sent_bytes` counts the content of files.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

_INFO = re.compile(r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?")
_FILE = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")
EXPIRED = "hf_expired"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None

    @property
    def file(self) -> str | None:
        """The repository file that was asked for, if it was one."""
        found = _FILE.fullmatch(self.path)
        return unquote(found[3]) if found and not self.path.startswith("/api/") else None


class HubServer:
    """A hub that serves the folders under `root`; everything it was asked is in `requests`."""

    def __init__(
        self,
        root: Path,
        *,
        gated: Mapping[str, set[str]] | None = None,
        announced_bytes: Mapping[str, int] | None = None,
        cuts: Mapping[str, list[int]] | None = None,
        stall: str | None = None,
        broken: bool = False,
        large: Sequence[str] = (),
    ) -> None:
        self.root, self.gated, self.announced_bytes = root, dict(gated or {}), dict(announced_bytes or {})
        self.cuts = {file: list(sizes) for file, sizes in (cuts or {}).items()}
        self.broken, self.large = broken, set(large)
        self.sent_bytes = 0
        self.stall, self.stalled = stall, threading.Event()
        self.requests: list[Request] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repository: str, branch: str = "main") -> str:
        """The commit of a branch: a digest of its files."""
        digest = hashlib.sha1(f"{repository}@{branch}".encode())
        for name, path in self.files(repository, branch).items():
            digest.update(name.encode() + path.read_bytes())
        return digest.hexdigest()

    def branch(self, repository: str, revision: str) -> str | None:
        """The branch that a branch's name or its commit means."""
        beside = (self.root / repository).parent.glob(f"{Path(repository).name}@*")
        branches = ["main", *(unquote(folder.name.partition("@")[2]) for folder in beside)]
        return next((name for name in branches if revision in (name, self.commit(repository, name))), None)

    def files(self, repository: str, branch: str = "main") -> dict[str, Path]:
        folder = self.root / (repository if branch == "main" else f"{repository}@{quote(branch, safe='')}")
        return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    def fetched(self, method: str = "GET") -> list[str]:
        """The repository files that were asked for by `method`, in order."""
        return [request.file for request in self.requests if request.method == method and request.file]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no error; and what a thread prints late stands in the output of another test."""


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is printed: `requests` is the log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.server_hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if found := _TREE.fullmatch(path):
            if branch := self._allowed(found[1], found[2], token, open_to_all=True):
                folder = None if "recursive=true" in self.path.lower() else unquote(found[3] or "")
                self._json(self._tree(found[1], branch, folder))
        elif found := _FILE.fullmatch(path):
            if branch := self._allowed(found[1], found[2], token, open_to_all=False):
                self._file(found[1], branch, unquote(found[3]))
        elif found := _INFO.fullmatch(path):
            if branch := self._allowed(found[1], found[2] or "main", token, open_to_all=True):
                self._json(self._info(found[1], branch))
        else:
            self._error(404, "EntryNotFound")

    def _allowed(self, repository: str, revision: str, token: str | None, *, open_to_all: bool) -> str | None:
        """The branch that is asked for, if it may be read; otherwise the answer is given here."""
        hub = self.server_hub
        if hub.broken:
            self._error(500, "InternalError")
        elif token == EXPIRED:
            self._error(401, None, "Invalid credentials in Authorization header")
        elif not (hub.root / repository).is_dir():
            self._error(404 if token else 401, "RepoNotFound")
        elif not open_to_all and repository in hub.gated and token not in hub.gated[repository]:
            self._error(403 if token else 401, "GatedRepo")
        elif (branch := hub.branch(repository, unquote(revision))) is None:
            self._error(404, "RevisionNotFound")
        else:
            return branch
        return None

    def _size(self, name: str, path: Path) -> int:
        return self.server_hub.announced_bytes.get(name, path.stat().st_size)

    def _info(self, repository: str, branch: str) -> dict[str, Any]:
        files = self.server_hub.files(repository, branch)
        siblings = [{"rfilename": name, "size": self._size(name, path)} for name, path in files.items()]
        commit = self.server_hub.commit(repository, branch)
        return {"id": repository.removeprefix("datasets/"), "sha": commit, "siblings": siblings, "private": False}

    def _tree(self, repository: str, branch: str, folder: str | None) -> list[dict[str, Any]]:
        """The files of a folder with the names of the folders in it; None: all files."""
        found: dict[str, dict[str, Any]] = {}
        for name, path in self.server_hub.files(repository, branch).items():
            about = {"type": "file", "path": name, "size": self._size(name, path), "oid": _etag(path)}
            if name in self.server_hub.large:
                about["lfs"] = {"oid": _etag(path), "size": about["size"], "pointerSize": 130}
            if folder is not None:
                above = f"{folder}/" if folder else ""
                if not name.startswith(above):
                    continue
                child, deeper, _ = name.removeprefix(above).partition("/")
                if deeper:
                    about = {"type": "directory", "path": above + child, "size": 0, "oid": "0" * 40}
            found[about["path"]] = about
        return list(found.values())

    def _json(self, tree: Any) -> None:
        body = json.dumps(tree).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, repository: str, branch: str, name: str) -> None:
        path = self.server_hub.files(repository, branch).get(name)
        if path is None:
            self._error(404, "EntryNotFound")
            return
        body, headers = path.read_bytes(), {"ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes"}
        headers["X-Repo-Commit"] = self.server_hub.commit(repository, branch)
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        begin = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1, len(body)) if wanted and wanted[2] else len(body)
        if wanted:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
        else:
            headers["X-Linked-Size"] = str(len(body))
        self._head(206 if wanted else 200, headers | {"Content-Length": str(end - begin)})
        if self.command == "GET":
            self.server_hub.sent_bytes += end - begin
            self._body(name, body[begin:end])

    def _body(self, name: str, body: bytes) -> None:
        hub = self.server_hub
        if name == hub.stall:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            hub.stalled.set()
            self.rfile.read(1)  # returns when the client is gone
        elif hub.cuts.get(name):
            self.wfile.write(body[: hub.cuts[name].pop(0)])
        else:
            self.wfile.write(body)
            return
        self.close_connection = True

    def _error(self, status: int, code: str | None, message: str = "refused") -> None:
        named = {"X-Error-Code": code} if code else {}
        self._head(status, {**named, "X-Error-Message": message, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
