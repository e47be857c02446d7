"""`forerun watch --web`: a server on 127.0.0.1 that sends the report of one run and nothing else.

Other programs and users of the machine can connect to the port, and web pages in the user's browser can send requests
to it. Each address therefore contains a random token, which is compared in constant time. The Host header must name
this machine, so that a web page cannot reach the server through its own domain name (DNS rebinding). Answers have no
CORS headers and are not stored. The server reads no path from a request: it has two addresses, and all others are 404.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from threading import Event
from typing import Any
from urllib.parse import parse_qs

from forerun.errors import UserError
from forerun.pages.render import chart_script, script_digest
from forerun.report.page import page
from forerun.report.run_facts import run_facts
from forerun.report.run_files import DamagedRunFile
from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunState, RunStatus, status_of
from forerun.reporter import Reporter
from forerun.safe_text import clean
from forerun.watch.run_reader import RunReader

ADDRESS = "127.0.0.1"
MAX_CONNECTIONS = 16  # at the same time
CONNECTION_SECONDS = 10.0  # for a client to send its request and to read the answer
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.ASCII | re.IGNORECASE)  # ssh -L may change the port


class LiveServer(ThreadingHTTPServer):
    """A server of one page.

    A new connection beyond `MAX_CONNECTIONS` closes the oldest one, so clients that send nothing cannot block others.
    A browser sends its request in one packet and is answered long before its connection is the oldest. Connections are
    also closed after `CONNECTION_SECONDS`: a timeout of the socket alone starts again with every byte.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # connections that the system accepts before the server does

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.token, self.policy = page, secrets.token_urlsafe(24), policy()
        self._connections: dict[socket.socket, float] = {}  # with the time of the accept, the oldest first
        self._lock = threading.Lock()
        super().__init__((ADDRESS, port), LiveHandler)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._connections) >= MAX_CONNECTIONS:
                self._cut(next(iter(self._connections)))
            self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.pop(request, None)

    def service_actions(self) -> None:
        """Close the connections that are too old. `serve_forever` calls this method regularly."""
        latest = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            for request in [request for request, accepted in self._connections.items() if accepted < latest]:
                self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        """End the reads and writes of a connection. Its thread then closes it."""
        self._connections.pop(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a browser that closes it. They would print the request's address."""


class LiveHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page (`/TOKEN/`) and of its newest content (`/TOKEN/content`)."""

    server: LiveServer
    timeout = CONNECTION_SECONDS
    server_version, sys_version = "forerun", ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        _, token, name = [*path.split("/", 2), "", ""][:3]
        if _HOST.fullmatch(self.headers.get("Host", "")) is None:
            self._answer(HTTPStatus.FORBIDDEN, b"this server is for 127.0.0.1 and localhost\n")
        elif not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            self._answer(HTTPStatus.FORBIDDEN, b"the token is missing or wrong: open the printed address\n")
        elif name not in ("", "content"):
            self._answer(HTTPStatus.NOT_FOUND, b"no such page\n")
        else:
            try:
                version, content = self.server.page.newest()
            except Exception as error:  # a page that cannot be made must not look like a server that has ended
                self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, clean(f"{_spoken(error)}\n").encode())
                return
            if name == "content" and parse_qs(query).get("version") == [version]:
                self._answer(HTTPStatus.NO_CONTENT, b"", version=version)
            else:
                self._answer(HTTPStatus.OK, content, "text/html; charset=utf-8", version=version)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or has another method."""
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code), b"only GET and HEAD\n")

    def log_message(self, *about: Any) -> None:
        """Log nothing: the address has the token."""

    def _answer(
        self, code: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8", *, version: str = ""
    ) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Connection": "close",
        }
        headers |= {"X-Version": version} if version else {}
        headers |= {"Allow": "GET, HEAD"} if code == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True


def _spoken(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"a bug in forerun: {type(error).__name__}: {error}"


def open_server(reader: RunReader, port: int = 0) -> LiveServer:
    """Return a server that listens. Port 0 is any free port.

    Raises:
      UserError: the location is not a run, or the port cannot be used.
    """
    page = LivePage(reader)
    try:
        return LiveServer(page, port)
    except OSError as error:
        raise UserError(
            "E-WATCH-004",
            f"port {port} of {ADDRESS} cannot be used",
            why=str(error.strerror or error),
            fix="give another port, or omit --port: then a free one is chosen",
        ) from error


def serve(reader: RunReader, port: int, end: Event, reporter: Reporter) -> None:
    """Serve the page of a run until `end` is set. The port is closed then."""
    server = open_server(reader, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="watch --web")
    thread.daemon = True
    thread.start()
    try:
        reporter.info(f"{server.url}\nCtrl-C ends. From another machine: {tunnel_command(server)}")
        end.wait()
    finally:
        server.shutdown()
        server.server_close()


def tunnel_command(server: LiveServer) -> str:
    """Return the command that forwards the port to another machine of the user."""
    port = server.server_address[1]
    return f"ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}"


def live_script() -> str:
    """Return the script that keeps the page up to date."""
    return resources.files("forerun.watch").joinpath("live.js").read_text("utf-8")


def policy() -> str:
    """Return the Content-Security-Policy: the two scripts of the page, and requests to its own server."""
    scripts = " ".join(f"'{script_digest(text)}'" for text in (chart_script(), live_script()))
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class LivePage:
    """The page of a run, for several threads. The files are read at most once in `reader.every_seconds`."""

    def __init__(
        self,
        reader: RunReader,
        clock: Callable[[], float] = time.monotonic,
        render: Callable[[RunRecord, RunStatus], str] | None = None,
    ) -> None:
        self._reader, self._clock, self._render = reader, clock, render or _rendered
        self._lock = threading.Lock()
        self._record = reader.read()
        self._read_at = clock()
        self._version, self._content = "", b""
        self._damage: DamagedRunFile | None = None

    def newest(self) -> tuple[str, bytes]:
        """Return the version of the page and its content. Equal versions have equal content.

        Raises:
          DamagedRunFile: a file of the run has a value of a wrong type. The page returns when the file is repaired.
        """
        with self._lock:
            if self._clock() - self._read_at >= self._reader.every_seconds:
                self._refresh()
            if self._damage is not None:
                raise self._damage
            status = status_of(self._record, self._reader.folder)
            version = version_of(self._record, status)
            if version != self._version:
                self._content = self._render(self._record, status).encode()
                self._version = version
            return self._version, self._content

    def _refresh(self) -> None:
        """Read what is new. A run that cannot be read now keeps its last page."""
        self._read_at = self._clock()
        try:
            self._record, self._damage = self._reader.read(), None
        except DamagedRunFile as error:
            self._damage = error
        except (UserError, OSError):
            return


def version_of(record: RunRecord, status: RunStatus) -> str:
    """Return a digest that changes with the records of a run and with its status."""
    last = [rows[-1] if rows else None for rows in (record.metrics, record.events, record.exports)]
    counts = [len(record.metrics), len(record.events), len(record.exports), len(record.skips)]
    # The text of a silent run changes all the time; a minute is enough.
    silent = round((status.age_seconds or 0.0) / 60) if status.state is RunState.SILENT else 0
    parts = [counts, last, record.summary, record.hosts, record.job.steps, str(status.state), status.detail, silent]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _rendered(record: RunRecord, status: RunStatus) -> str:
    return page(record, replace(run_facts(record), status=status), live_script=live_script())
