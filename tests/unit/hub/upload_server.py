"""The hub on this machine with the routes of an upload: create, model card, preupload, LFS and commit.

    with UploadServer(folder) as hub:
        ...                             # the repositories are in folder/owner/name

`owners` maps a token to the owner that it may write to. `drop` is the digest of an LFS object: the connection
that sends it is closed in the middle, once. `race` makes the next commit find another parent. LFS objects are kept by
their digest, as on the real hub, also if no commit follows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hub_server import EXPIRED, HubServer, Request, _Handler

LFS_ENDINGS = (".safetensors", ".gguf")
_PREUPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/preupload/main")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_OBJECT = re.compile(r"/lfs/([0-9a-f]{64})(/verify)?")
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/commit/main")


class UploadServer(HubServer):
    """A hub that accepts uploads."""

    def __init__(self, root: Path, *, owners: Mapping[str, str], drop: str | None = None) -> None:
        super().__init__(root)
        self.owners, self.drop, self.race = dict(owners), drop, False
        self.visibility: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}
        self.stored: list[str] = []  # digests of the objects that were sent, in order
        self.messages: list[str] = []
        hub = self

        class Handler(_UploadHandler):
            server_hub = hub

        self._server.RequestHandlerClass = Handler


class _UploadHandler(_Handler):
    server_hub: UploadServer

    def do_POST(self) -> None:  # noqa: N802
        body = self._body_bytes()
        path, token = urlsplit(self.path).path, self._token()
        self.server_hub.requests.append(Request("POST", path, None, token))
        if found := _OBJECT.fullmatch(path):
            self._json_or(found[1] in self.server_hub.objects, {})
        elif token is None or token == EXPIRED:
            self._error(401, None, "Invalid credentials in Authorization header")
        elif path == "/api/validate-yaml":
            self._post({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body), token)
        elif found := _PREUPLOAD.fullmatch(path) or _BATCH.fullmatch(path) or _COMMIT.fullmatch(path):
            if self.server_hub.owners.get(token) != found[1].partition("/")[0]:
                self._error(403, None, "you may not write here")
            elif found.re is _PREUPLOAD:
                files = json.loads(body)["files"]
                self._post({"files": [self._mode(file["path"]) for file in files]})
            elif found.re is _BATCH:
                self._post({"transfer": "basic", "objects": [self._plan(one) for one in json.loads(body)["objects"]]})
            else:
                self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._error(404, "EntryNotFound")

    def do_PUT(self) -> None:  # noqa: N802
        hub = self.server_hub
        path = urlsplit(self.path).path
        hub.requests.append(Request("PUT", path, None, self._token()))
        if hub.drop is not None and path == f"/lfs/{hub.drop}":
            hub.drop = None
            self.rfile.read(1000)
            self.close_connection = True
            self.connection.close()
            return
        body, found = self._body_bytes(), _OBJECT.fullmatch(path)
        assert found is not None
        assert hashlib.sha256(body).hexdigest() == found[1]
        hub.objects[found[1]] = body
        hub.stored.append(found[1])
        self._post({})

    def _body_bytes(self) -> bytes:
        """The body of a request, also of one whose length is not announced."""
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _create(self, asked: dict[str, Any], token: str) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if self.server_hub.owners.get(token) != asked["organization"]:
            self._error(403, None, "you may not create repositories here")
            return
        folder = self.server_hub.root / name
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        self.server_hub.visibility[name] = asked["visibility"]
        self._post({"url": f"{self.server_hub.endpoint}/{name}", "name": name, "id": name})

    def _mode(self, path: str) -> dict[str, Any]:
        return {"path": path, "uploadMode": "lfs" if path.endswith(LFS_ENDINGS) else "regular", "shouldIgnore": False}

    def _plan(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.server_hub.objects:
            return wanted  # no action: the hub has the content
        place = f"{self.server_hub.endpoint}/lfs/{wanted['oid']}"
        return wanted | {"actions": {"upload": {"href": place}, "verify": {"href": f"{place}/verify"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        hub, folder = self.server_hub, self.server_hub.root / name
        header, *operations = lines
        parent = header["value"].get("parentCommit")
        if hub.race or (parent is not None and parent != hub.commit(name)):
            self._error(412, None, "A commit has happened since")
            return
        for operation in operations:
            value = operation["value"]
            path = folder / value["path"]
            if operation["key"] == "deletedFile":
                path.unlink()
                continue
            is_lfs = operation["key"] == "lfsFile"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(hub.objects[value["oid"]] if is_lfs else base64.b64decode(value["content"]))
        hub.messages.append(header["value"]["summary"])
        oid = hub.commit(name)
        self._post({"success": True, "commitOid": oid, "commitUrl": f"{hub.endpoint}/{name}/commit/{oid}"})

    def _info(self, repository: str, branch: str) -> dict[str, Any]:
        found = super()._info(repository, branch)
        files = self.server_hub.files(repository, branch)
        for sibling in found["siblings"]:
            body = files[unquote(sibling["rfilename"])].read_bytes()
            sibling["blobId"] = hashlib.sha1(f"blob {len(body)}\0".encode() + body).hexdigest()
            if sibling["rfilename"].endswith(LFS_ENDINGS):
                sibling["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        return found | {"private": self.server_hub.visibility.get(repository) == "private"}

    def _post(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _json_or(self, exists: bool, content: Any) -> None:
        if exists:
            self._post(content)
        else:
            self._error(404, "EntryNotFound")
