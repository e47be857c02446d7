"""A fast read-only server of a folder with the protocol of Google Cloud Storage, in a process of its own.

with served(folder, latency_seconds=0.03) as server:
    os.environ.update(server.environment)       # before the first read of TensorStore
    ...                                         # gs://bench/KEY is folder/KEY
    server.counts()                             # {"requests": 12, "bytes": 98304, "tokens": 8, ...}

It answers the reads of the JSON API: `alt=media` with a range, metadata, and lists. An emulator for tests answers 200
to 300 reads per second on one core; this server answers thousands, so that the client is what a benchmark measures.

Every folder `unit-00007-of-52000` is served from the one folder `unit-00000-of-00001` if it does not exist. A store of
60 TB therefore needs the disk space of one unit.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

BUCKET = "bench"
UNIT = re.compile(r"unit-\d+-of-\d+")
THE_UNIT = "unit-00000-of-00001"
ROUTE = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o(?:/([^/]+))?$")
RANGE = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d*)", re.IGNORECASE)
REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 405: "Method Not Allowed", 416: "Bad Range"}


class Server:
    """The client's side of a running server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.environment = {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def counts(self) -> dict[str, int]:
        """Return the numbers of requests, of bytes, and of requests for each kind of file."""
        return self._ask("/counts")

    def set_latency(self, seconds: float) -> None:
        """Change the time that is added to each request."""
        self._ask(f"/latency?seconds={seconds}")

    def _ask(self, path: str) -> Any:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(self.address + path, timeout=60) as answer:
            return json.loads(answer.read())


@contextmanager
def served(folder: Path, latency_seconds: float = 0.0) -> Iterator[Server]:
    """Serve the content of `folder` as the bucket `bench` until the block is left."""
    command = [sys.executable, "-P", __file__, str(folder), str(latency_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Server(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


class _Files:
    """The files of the folder, the latency and the counts, shared by all connections."""

    def __init__(self, folder: Path, latency_seconds: float) -> None:
        self.folder, self.latency_seconds = folder, latency_seconds
        self.counts: Counter[str] = Counter()
        self._open: dict[str, tuple[int, int]] = {}

    def opened(self, name: str) -> tuple[int, int] | None:
        """Return the descriptor and the size of a file; None if there is none."""
        path = self.folder / name
        if not path.is_file():
            path = self.folder / UNIT.sub(THE_UNIT, name)
        found = self._open.get(str(path))
        if found is None and path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            found = self._open[str(path)] = descriptor, os.fstat(descriptor).st_size
        return found

    def listed(self, query: dict[str, list[str]]) -> bytes:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        base = self.folder / prefix.rpartition("/")[0]
        names = [str(path.relative_to(self.folder)) for path in base.rglob("*") if path.is_file()]
        items, prefixes = [], set()
        for name in sorted(name for name in names if name.startswith(prefix)):
            inside, found, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
            if found:
                prefixes.add(prefix + inside + delimiter)
            else:
                items.append(self.about(name, (self.folder / name).stat().st_size))
        return json.dumps({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}).encode()

    @staticmethod
    def about(name: str, size: int) -> dict[str, str]:
        return {"kind": "storage#object", "name": name, "bucket": BUCKET, "size": str(size), "generation": "1"}


class _Connection(asyncio.Protocol):
    """One connection with a client. Requests on it follow each other."""

    def __init__(self, files: _Files) -> None:
        self._files, self._buffer = files, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            if self._files.latency_seconds:
                asyncio.get_running_loop().call_later(self._files.latency_seconds, self._answer, head)
            else:
                self._answer(head)

    def _answer(self, head: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        where, _, words = path.partition("?")
        query, files = parse_qs(words), self._files
        if method != "GET":
            return self._send(405)
        if where == "/counts":
            return self._send(200, json.dumps(files.counts).encode())
        if where == "/latency":
            files.latency_seconds = float(query["seconds"][0])
            return self._send(200, b"{}")
        route = ROUTE.fullmatch(where)
        if route is None or route[1] != BUCKET:
            return self._send(404)
        files.counts["requests"] += 1
        if route[2] is None:
            files.counts["lists"] += 1
            return self._send(200, files.listed(query))
        name = unquote(route[2])
        files.counts[name.rpartition("/")[2].partition(".")[2]] += 1
        found = files.opened(name)
        if found is None:
            return self._send(404)
        if query.get("alt") != ["media"]:
            return self._send(200, json.dumps(files.about(name, found[1])).encode())
        return self._send_range(head, *found)

    def _send_range(self, head: bytes, descriptor: int, size: int) -> None:
        part = RANGE.search(head)
        if part is None:
            body, status, extra = os.pread(descriptor, size, 0), 200, ""
        else:
            start, stop = int(part[1]), min(int(part[2] or size - 1) + 1, size)
            if start >= size:
                return self._send(416)
            body, status = os.pread(descriptor, stop - start, start), 206
            extra = f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n"
        self._files.counts["bytes"] += len(body)
        return self._send(status, body, f"{extra}x-goog-generation: 1\r\n")

    def _send(self, status: int, body: bytes = b"", extra: str = "") -> None:
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self._transport.write(head.encode() + body)


async def _serve(folder: Path, latency_seconds: float) -> None:
    files = _Files(folder, latency_seconds)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(files), "127.0.0.1", 0, backlog=512)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
