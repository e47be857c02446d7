"""A proxy in front of the bucket's emulator that misbehaves on command, by requests and by bytes.

| mode | what clients see |
| --- | --- |
| `""` | the emulator |
| `flaky` | 30 % of the requests are answered 429 or 503 |
| `refuse` | every request is answered 503 |
| `close` | every connection is reset |
| `hang` | connections stay open and nothing is answered |
| `slow` | bytes come through at SLOW_BYTES per second |
| `reset` | every third upload is reset in the middle of its body |
| `lost` | every second creation of a commit record succeeds, and its answer is lost |
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SLOW_BYTES = 65536
BLOCK = 4096
HOP = {"connection", "transfer-encoding", "keep-alive"}


class Proxy:
    def __init__(self, target: str, seed: int = 0) -> None:
        split = urlsplit(target)
        self.target = (split.hostname or "", split.port or 80)
        self.mode = ""
        self.counts: Counter[str] = Counter()
        self.chance = random.Random(seed)
        self.lock = threading.Lock()

    @contextmanager
    def serve(self) -> Iterator[str]:
        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that is gone."""

        handler = type("Handler", (Handler,), {"proxy": self})
        server = Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.mode = "close"
            server.shutdown()
            server.server_close()

    def turn(self, what: str) -> int:
        with self.lock:
            self.counts[what] += 1
            return self.counts[what]


class Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def log_message(self, *_: object) -> None: ...

    def relay(self) -> None:
        proxy, mode = self.proxy, self.proxy.mode
        proxy.turn("requests")
        upload = self.command in ("POST", "PUT") and "upload" in self.path
        if mode == "close" or (mode == "reset" and upload and proxy.turn("uploads") % 3 == 0):
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            return self.reset()
        if mode == "hang":
            while proxy.mode == "hang":
                time.sleep(0.05)
            return self.reset()
        body = self.body(mode == "slow")
        if mode == "refuse" or (mode == "flaky" and proxy.chance.random() < 0.3):
            return self.answer(proxy.chance.choice([429, 503]), [], b"{}", slow=False)
        record = b"commits" in body or "commits" in self.path
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        with closing(http.client.HTTPConnection(*proxy.target, timeout=300)) as connection:
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            response = connection.getresponse()
            content = response.read()
        if mode == "lost" and upload and record and response.status == 200 and proxy.turn("records") % 2:
            return self.reset()
        return self.answer(response.status, response.getheaders(), content, slow=mode == "slow")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = relay

    def body(self, slow: bool) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        left, parts = int(self.headers.get("Content-Length") or 0), []
        while left:
            parts.append(self.rfile.read(min(BLOCK, left) if slow else left))
            left -= len(parts[-1])
            if slow:
                time.sleep(len(parts[-1]) / SLOW_BYTES)
        return b"".join(parts)

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, slow: bool) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in HOP | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content), BLOCK) if slow else ():
            self.wfile.write(content[start : start + BLOCK])
            self.wfile.flush()
            time.sleep(BLOCK / SLOW_BYTES)
        if not slow and self.command != "HEAD":
            self.wfile.write(content)

    def reset(self) -> None:
        """RST, not an orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
