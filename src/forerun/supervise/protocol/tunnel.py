"""Tunnels that forward the workers' connections to jax's coordinator on host 0.

jax's coordinator accepts every client that reaches it: it has no authentication that works in all supported versions.
forerun therefore starts it on a Unix socket in a folder that only its user can open. On every other host, the
supervisor listens on such a socket too. It forwards each connection to the leader's port as a `Line`, and the leader
connects that line to the coordinator's socket. The frames of a tunnel are authenticated, but not encrypted.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from forerun.supervise.protocol.json_form import encode
from forerun.supervise.protocol.messages import OpenTunnel
from forerun.supervise.protocol.wire import Line, Refused

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.05
MAX_PATH_BYTES = 100  # a Unix socket's path has at most 107 bytes on Linux and 103 on macOS


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder with mode 0700, whose path is short enough for Unix sockets."""
    folder = tempfile.TemporaryDirectory(prefix="forerun-", ignore_cleanup_errors=True)
    if len(os.fsencode(coordinator_socket(Path(folder.name), 10**9))) <= MAX_PATH_BYTES:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="forerun-", dir="/tmp", ignore_cleanup_errors=True)


def coordinator_socket(folder: Path, attempt: int) -> Path:
    """Return the socket at which this host's worker reaches the coordinator of an attempt.

    The path differs between attempts, so a worker of an older attempt never reaches the coordinator of the next one.
    """
    return folder / f"coordinator-{attempt}"


class TunnelEntrance:
    """The end of the tunnels on a host without the coordinator. Each connection to its socket becomes a tunnel."""

    def __init__(self, folder: Path, attempt: int, connect: Callable[[], Awaitable[Line]]) -> None:
        """Prepare the socket of an attempt. `connect` opens an authenticated line to the leader."""
        self._path, self._attempt, self._connect = coordinator_socket(folder, attempt), attempt, connect
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await self._connect()
        except (OSError, EOFError, Refused):  # a TimeoutError is an OSError; gRPC retries the connection
            writer.close()
            return
        except BaseException:
            writer.close()
            raise
        line.send(encode(OpenTunnel(self._attempt)))
        await carry(line, reader, writer)


class TunnelExit:
    """The end of the tunnels on host 0. It connects the tunnels of the current attempt to the coordinator."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._attempt, self._reached = folder, 0, False
        self._lines: set[Line] = set()

    def begin(self, attempt: int) -> None:
        """Accept the tunnels of an attempt."""
        self._attempt, self._reached = attempt, False

    def end(self) -> None:
        """Close all tunnels, and accept no other one until the next attempt."""
        self._attempt = 0
        for line in self._lines:
            line.abort()

    async def serve(self, line: Line, attempt: int) -> None:
        """Forward between `line` and the coordinator until either side closes. Close a line of another attempt."""
        self._lines.add(line)
        try:
            while self._attempt and attempt == self._attempt:
                try:
                    stream = await asyncio.open_unix_connection(coordinator_socket(self._folder, self._attempt))
                except (FileNotFoundError, ConnectionRefusedError):
                    # The coordinator was reachable before, so host 0's worker has exited. The other workers notice it
                    # only if their connections close.
                    if self._reached:
                        break
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    self._reached = True
                    await carry(line, *stream)
                    break
        finally:
            self._lines.discard(line)
            line.close()


async def carry(line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes between a line and a local connection until one of them closes, then close both."""
    directions = [asyncio.create_task(work) for work in (_outward(reader, line), _inward(line, writer))]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        line.close()
        writer.close()
        await asyncio.gather(*directions, return_exceptions=True)


async def _outward(reader: asyncio.StreamReader, line: Line) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            line.send_bytes(data)
            await line.drain()


async def _inward(line: Line, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, EOFError, Refused):
        while True:
            writer.write(await line.receive_bytes())
            await writer.drain()
