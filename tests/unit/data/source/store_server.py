"""Stores that a test starts on this machine: a bucket of an emulator in a process of its own, and a web server.

with gcs_emulator(folder) as store:
    store.put("books/a.jsonl", b"...")      # plain HTTP, not the driver under test
    subprocess.run(..., env=os.environ | store.environment)
"""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SO_REUSEADDR, SOL_SOCKET, socket
from urllib.parse import quote

BUCKET = "books"
_PATIENCE_SECONDS = 240  # only a hang takes so long


@dataclass(frozen=True)
class Store:
    environment: dict[str, str]
    put: Callable[[str, bytes], None]


@contextmanager
def gcs_emulator(folder: Path) -> Iterator[Store]:
    # Held to the end, without listening: the emulator may take it, too, and the kernel gives it to nobody else.
    with socket() as held:
        held.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        command = ["gcp_storage_emulator", "-d", str(folder), "start", "--host", "127.0.0.1", "--port", str(port)]
        with _running([*command, "--default-bucket", BUCKET], "All services started"):
            host = f"http://127.0.0.1:{port}"

            def put(name: str, body: bytes) -> None:
                to = f"{host}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
                _send(to, "POST", body)

            settings = {"STORAGE_EMULATOR_HOST": host, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
            yield Store(settings | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x"}, put)


@contextmanager
def s3_emulator() -> Iterator[Store]:
    with _running(["moto.server", "-H", "127.0.0.1", "-p", "0"], r"Running on (http://127\.0\.0\.1:\d+)") as found:
        host = found[1]
        _send(f"{host}/{BUCKET}", "PUT", b"")
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        yield Store(
            keys | {"AWS_ENDPOINT_URL_S3": host},
            lambda name, body: _send(f"{host}/{BUCKET}/{quote(name)}", "PUT", body),
        )


def _send(to: str, method: str, body: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(to, body, headers, method=method), timeout=_PATIENCE_SECONDS) as answer:
        assert answer.status == 200


@contextmanager
def _running(module: list[str], ready: str) -> Iterator[re.Match[str]]:
    """`python -m module`, once a line of its log matches `ready`; ended when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *module], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log: list[str] = []
    found: list[re.Match[str]] = []
    seen = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if not found and (match := re.search(ready, line)):
                found.append(match)
                seen.set()
        seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert seen.wait(_PATIENCE_SECONDS), f"{module[0]} did not start"
        assert found, "".join(log)
        yield found[0]
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


class WebServer:
    """Serves `files` by path, whole or in parts; what was asked is in `asked` as (method, path, range).

    A path below /whole/ is always sent whole, as simple servers do; one below /closed/ answers 403.
    """

    def __init__(self, files: dict[str, bytes], certificate: Path | None = None) -> None:
        self.files = files
        self.asked: list[tuple[str, str, str | None]] = []
        web = self

        class Handler(_Handler):
            server_web = web

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.address = self.address.replace("http:", "https:")
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no error; and what a thread prints late stands in the output of another test."""


class _Handler(BaseHTTPRequestHandler):
    server_web: WebServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is printed: `asked` is the log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        self.server_web.asked.append((self.command, path, wanted))
        name = path.removeprefix("/whole")
        body = self.server_web.files.get(name)
        if body is None:
            self._send(403 if path.startswith("/closed/") else 404, b"", {})
        elif (part := re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")) and name == path:
            start, stop = int(part[1]), min(int(part[2]) + 1, len(body))
            self._send(206, body[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(body)}"})
        else:
            self._send(200, body, {"Accept-Ranges": "bytes"} if name == path else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body)), "ETag": '"1"'}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
