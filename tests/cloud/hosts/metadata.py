"""The metadata server of one host, as `metadata.google.internal` serves it."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROOT = "/computeMetadata/v1/"
TOKEN = "ya29.token-of-the-service-account"  # tests search for it where it must not be


@dataclass
class Metadata:
    """What the server of one host tells. `changed` wakes requests that wait for a change."""

    tree: dict[str, Any]
    guest: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, path: str, value: str) -> None:
        with self.changed:
            place = self.tree
            *folders, name = path.split("/")
            for folder in folders:
                place = place[folder]
            place[name] = value
            self.changed.notify_all()

    def get(self, path: str) -> Any:
        found: Any = self.tree
        for part in path.strip("/").split("/"):
            if part:
                found = found[part]
        return found


def instance_metadata(
    *,
    slice_name: str,
    zone: str,
    project: str,
    index: int,
    addresses: list[tuple[str, str]],
    attributes: Mapping[str, str],
    accelerator: str,
) -> Metadata:
    """Return the metadata of host `index` of a TPU slice.

    Args:
      addresses: external and internal address of each host.
      attributes: the metadata of the request that created the slice.
    """
    external, internal = addresses[index]
    endpoints = ",".join(f"unknown:unknown:{one}" for _, one in addresses)
    environment = {
        "ACCELERATOR_TYPE": accelerator,
        "WORKER_ID": str(index),
        "ZONE": zone,
        "NODE_ID": slice_name,
        "CONSUMER_PROJECT_ID": project,
        "HOST_BOUNDS": f"1,{len(addresses)},1",
        "WORKER_NETWORK_ENDPOINTS": endpoints,
    }
    account = {
        "email": f"machines@{project}.iam.gserviceaccount.com",
        "aliases": ["default"],
        "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
        "token": {"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"},
    }
    return Metadata(
        {
            "instance": {
                "attributes": {
                    **attributes,
                    "accelerator-type": accelerator,
                    "agent-worker-number": str(index),
                    "worker-network-endpoints": endpoints,
                    "instance-id": slice_name,
                    "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in environment.items()),
                },
                "id": str(int(hashlib.sha256(f"{slice_name}/{index}".encode()).hexdigest()[:15], 16)),
                "name": f"t1v-n-{hashlib.sha256(slice_name.encode()).hexdigest()[:8]}-w-{index}",
                "hostname": f"{slice_name}-w-{index}.{zone}.c.{project}.internal",
                "zone": f"projects/123456789/zones/{zone}",
                "machine-type": "projects/123456789/machineTypes/n2d-48-24-v2-tpu",
                "preempted": "FALSE",
                "maintenance-event": "NONE",
                "network-interfaces": {
                    "0": {"ip": internal, "access-configs": {"0": {"external-ip": external, "type": "ONE_TO_ONE_NAT"}}}
                },
                "service-accounts": {"default": account, account["email"]: account},
            },
            "project": {"project-id": project, "numeric-project-id": "123456789", "attributes": {}},
        }
    )


class MetadataServer:
    """Serves `metadata` on a socket that listens already, until it is closed."""

    def __init__(self, listening: socket.socket, metadata: Metadata) -> None:
        class Handler(_Handler):
            pass

        Handler.metadata = metadata
        self._server = ThreadingHTTPServer(listening.getsockname(), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = listening
        self._server.server_name, self._server.server_port = listening.getsockname()
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.05), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    metadata: Metadata

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        if address.path == "/":  # what clients ask to find out whether this is a machine of the cloud
            self._answer(200, b"computeMetadata/\n")
            return
        path = self._checked(address.path)
        if path is None:
            return
        if path.startswith("instance/guest-attributes"):
            found = self.metadata.guest.get(path.removeprefix("instance/guest-attributes").strip("/"))
            self._answer(404 if found is None else 200, (found or "").encode())
            return
        try:
            value = self._value(path, query)
        except (KeyError, TypeError):
            self._answer(404, b"not found\n")
            return
        kind, content = _content(path, value, query)
        self._answer(200, content, {"Content-Type": kind, "ETag": _etag(value)})

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        path = self._checked(urllib.parse.urlsplit(self.path).path)
        if path is None:
            return
        if not path.startswith("instance/guest-attributes/"):
            self._answer(405, b"")
            return
        with self.metadata.changed:
            self.metadata.guest[path.removeprefix("instance/guest-attributes/")] = content
            self.metadata.changed.notify_all()
        self._answer(200, b"")

    def _value(self, path: str, query: Mapping[str, str]) -> Any:
        with self.metadata.changed:
            before = _etag(self.metadata.get(path))
            if query.get("wait_for_change") == "true" and query.get("last_etag", before) == before:
                limit = float(query.get("timeout_sec", "600"))
                self.metadata.changed.wait_for(lambda: _etag(self.metadata.get(path)) != before, limit)
            return self.metadata.get(path)

    def _checked(self, path: str) -> str | None:
        if self.headers.get("Metadata-Flavor") != "Google" or not path.startswith(ROOT):
            self._answer(403, b"Missing Metadata-Flavor:Google header.\n")
            return None
        return path.removeprefix(ROOT)

    def _answer(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        fields = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "Content-Type": "application/text"}
        for name, value in (fields | dict(headers or {}) | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _etag(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _content(path: str, value: Any, query: Mapping[str, str]) -> tuple[str, bytes]:
    if path.rstrip("/").endswith("/token"):
        return "application/json", json.dumps(value).encode()
    if isinstance(value, dict) and query.get("recursive") != "true":
        names = (f"{name}/" if isinstance(found, dict) else name for name, found in value.items())
        return "application/text", "".join(f"{name}\n" for name in names).encode()
    if isinstance(value, dict) or query.get("alt") == "json":
        return "application/json", json.dumps(_camel(value)).encode()
    if isinstance(value, list):
        return "application/text", "\n".join(value).encode()
    return "application/text", str(value).encode()


def _camel(value: Any) -> Any:
    """Return the tree with names as the server writes them in JSON. Attributes keep theirs."""
    if not isinstance(value, dict):
        return value
    return {
        name if "@" in name else _camel_name(name): found if name == "attributes" else _camel(found)
        for name, found in value.items()
        if name != "token"  # is served alone, never in a tree
    }


def _camel_name(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(part.capitalize() for part in rest)
