"""A reverse proxy that injects faults into the reads of a bucket, in front of an emulator of GCS or S3.

with FaultyProxy(address, every=50) as proxy:
    subprocess.run(..., env=proxy.environment(store.environment))
    assert proxy.injected()["flip"] == 3

Reads of data objects are numbered. The numbers divisible by `every` get a fault, whose kind depends only on the seed
and the number of the fault:

| kind | what the client receives |
| --- | --- |
| `refuse` | the status 503, without data |
| `reset` | the head of the answer, then a connection that is reset |
| `slow` | the right answer, `slow_seconds` late |
| `short` | half of the body, with a Content-Length that matches it |
| `cut` | half of the body, with the Content-Length of the complete body, and the end of the connection |
| `flip` | the complete body with one changed bit, without headers that contain a checksum |

An object whose last read had a fault is left alone once: the fault moves to the next read of another object. A client
that repeats each request once therefore always succeeds, whatever the order of concurrent requests is.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import unquote, urlsplit

KINDS = ("refuse", "reset", "slow", "short", "cut", "flip")
DATA = re.compile(r"\.(tokens|offsets|learned)(\.sums)?$")
ADDRESSES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL", "AWS_ENDPOINT_URL_S3")
CHECKSUMS = (b"x-goog-hash", b"content-md5", b"x-amz-checksum", b"x-goog-stored-content")
FLIP_BYTES = 8  # at the start: a client that merges requests uses the first bytes, and not always those in the middle
RESET_SECONDS = 0.05
UPSTREAM_REQUESTS = 4  # at the same time: the kernel drops connections beyond the short queue of an emulator
_LIMIT_BYTES = 1 << 26  # of a line of a header, and of what a stream buffers


class Injected(NamedTuple):
    """A fault that a client has received."""

    kind: str
    object: str


@dataclass
class _Message:
    """The head and the body of a request or an answer. `raw` is the body as it was sent, with the sizes of chunks."""

    first: bytes
    headers: list[tuple[bytes, bytes]]
    raw: bytes = b""
    body: bytes = b""

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def without(self, *names: bytes) -> list[tuple[bytes, bytes]]:
        return [(key, value) for key, value in self.headers if not key.lower().startswith(names)]

    def head(self) -> bytes:
        lines = [self.first, *(key + b": " + value for key, value in self.headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class FaultyProxy:
    """A proxy of one emulator, with an event loop in a thread of its own.

    Args:
      target: the address of the emulator, as in `http://127.0.0.1:1234`.
      every: the number of reads of data objects per fault; 0: no faults. It can be changed at any time.
      kinds: the kinds of faults.
      seed: selects the kind of each fault and the changed bit.
      latency_seconds: added to every request.
      slow_seconds: added to a read with the fault `slow`.
      is_data: whether a read of the object of this name may get a fault.
    """

    def __init__(
        self,
        target: str,
        *,
        every: int = 0,
        kinds: Sequence[str] = KINDS,
        seed: int = 0,
        latency_seconds: float = 0.0,
        slow_seconds: float = 0.5,
        is_data: Callable[[str], object] = DATA.search,
    ) -> None:
        split = urlsplit(target)
        self._target = (split.hostname or "", split.port or 80)
        self.every, self.kinds, self.seed = every, tuple(kinds), seed
        self.latency_seconds, self.slow_seconds, self.is_data = latency_seconds, slow_seconds, is_data
        self.requests = self.reads = self.read_bytes = 0
        self.faults: list[Injected] = []
        self.per_object: Counter[str] = Counter()
        self._due = 0
        self._spared: set[str] = set()
        self._upstream_limit = asyncio.Semaphore(UPSTREAM_REQUESTS)
        self._loop = asyncio.new_event_loop()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="faulty-proxy", daemon=True)

    def injected(self) -> Counter[str]:
        """Return the number of faults of each kind so far."""
        return Counter(one.kind for one in list(self.faults))

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of an emulator with the address of the proxy instead of its own."""
        return {key: self.address if key in ADDRESSES else value for key, value in environment.items()}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(lambda *_: None)  # a client that is gone is no error
        server = self._loop.run_until_complete(
            asyncio.start_server(self._client, sock=self._listening, limit=_LIMIT_BYTES)
        )
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = _Upstream(self._target)
        try:
            while (request := await _message(reader)) is not None:
                if not await self._answer(request, upstream, writer):
                    break
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            upstream.close()
            with suppress(RuntimeError):
                writer.close()

    async def _answer(self, request: _Message, upstream: _Upstream, writer: asyncio.StreamWriter) -> bool:
        """Send the answer of a request. Return whether the connection stays open."""
        method, path, _ = request.first.decode("latin-1").split(" ")
        self.requests += 1
        name, kind = object_of(path), ""
        if method == "GET" and self.is_data(name):
            self.reads += 1
            self.per_object[name] += 1
            kind = self._fault(name)
        if self.latency_seconds:
            await asyncio.sleep(self.latency_seconds)
        if kind == "refuse":
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
            return True
        if kind == "slow":
            await asyncio.sleep(self.slow_seconds)
        async with self._upstream_limit:
            answer = await upstream.ask(request, method)
        if kind == "reset":
            writer.write(answer.head())
            await asyncio.sleep(RESET_SECONDS)  # the client has seen the head: libraries repeat silently without it
            _reset(writer)
            return False
        if method == "GET" and self.is_data(name):
            self.read_bytes += len(answer.body)
        return self._send(answer, kind, method, writer)

    def _send(self, answer: _Message, kind: str, method: str, writer: asyncio.StreamWriter) -> bool:
        body, stays = answer.body, True
        length = answer.get(b"content-length") if method == "HEAD" else b"%d" % len(body)
        headers = answer.without(b"connection", b"keep-alive", b"transfer-encoding", b"content-length")
        if kind == "flip":
            chance = random.Random(f"{self.seed} {len(self.faults)}")
            changed = bytearray(body)
            changed[chance.randrange(min(len(body), FLIP_BYTES))] ^= 1 << chance.randrange(8)
            body = bytes(changed)
            headers = [(key, value) for key, value in headers if not key.lower().startswith(CHECKSUMS)]
        elif kind in ("short", "cut"):
            body = body[: len(body) // 2]
            if kind == "short":
                length = b"%d" % len(body)
            stays = kind == "short"
        if length is not None:
            headers.append((b"Content-Length", length))
        writer.write(_Message(answer.first.replace(b"HTTP/1.0", b"HTTP/1.1"), headers).head() + body)
        return stays

    def _fault(self, name: str) -> str:
        """Return the kind of fault of this read; "" for none."""
        if self.every and self.reads % self.every == 0:
            self._due += 1
        if name in self._spared:
            self._spared.discard(name)
            return ""
        if not self._due:
            return ""
        self._due -= 1
        turn, place = divmod(len(self.faults), len(self.kinds))  # each turn has every kind once
        kind = random.Random(f"{self.seed} {turn}").sample(self.kinds, len(self.kinds))[place]
        self.faults.append(Injected(kind, name))
        if kind != "slow":  # nothing is repeated
            self._spared.add(name)
        return kind


class _Upstream:
    """A connection to the emulator, which is opened again if the emulator closes it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: _Message, method: str) -> _Message:
        for last in (False, True):
            fresh = self._open is None
            if self._open is None:
                self._open = await asyncio.open_connection(*self._target, limit=_LIMIT_BYTES)
            reader, writer = self._open
            try:
                writer.write(request.head() + request.raw)
                await writer.drain()
                answer = await _message(reader, answers=method)
                if answer is None:
                    raise ConnectionResetError
            except (OSError, EOFError):
                self.close()
                if last or fresh:
                    raise
                continue
            kept = (answer.get(b"connection") or b"").lower()
            if kept == b"close" or (answer.first.startswith(b"HTTP/1.0") and kept != b"keep-alive"):
                self.close()
            return answer
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._open is not None:
            with suppress(RuntimeError):
                self._open[1].close()
            self._open = None


def object_of(path: str) -> str:
    """Return the name of the object that a request names; "" if it names none.

    GCS has `/storage/v1/b/BUCKET/o/NAME?alt=media`, also below `/download`; S3 has `/BUCKET/NAME`.
    """
    where, _, query = path.partition("?")
    if found := re.search(r"/b/[^/]+/o/([^/]+)$", where):
        return unquote(found[1]) if "alt=media" in query else ""
    return unquote(where).lstrip("/").partition("/")[2] if "/b/" not in where else ""


async def _message(reader: asyncio.StreamReader, answers: str = "") -> _Message | None:
    """Return the next message of a connection; None at its end. `answers` is the method that an answer belongs to."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    found = _Message(first, [(key, value.strip()) for key, _, value in pairs])
    if answers and first.split(b" ")[1] == b"100":
        return await _message(reader, answers)
    if not answers and (found.get(b"expect") or b"").lower() == b"100-continue":
        found.headers = found.without(b"expect")
    if answers == "HEAD" or (answers and first.split(b" ")[1] in (b"204", b"304")):
        return found
    if b"chunked" in (found.get(b"transfer-encoding") or b"").lower():
        await _read_chunks(reader, found)
    elif (length := found.get(b"content-length")) is not None:
        found.raw = found.body = await reader.readexactly(int(length))
    elif answers:
        found.raw = found.body = await reader.read()
    return found


async def _read_chunks(reader: asyncio.StreamReader, found: _Message) -> None:
    raw, body = bytearray(), bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        raw += line + data
        body += data[:-2]
        if not size:
            break
    found.raw, found.body = bytes(raw), bytes(body)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST instead of an orderly end."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
