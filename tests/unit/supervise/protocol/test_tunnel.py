"""Tests of the tunnels to jax's coordinator, over real sockets."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.listener import Listener
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Ending
from forerun.supervise.protocol.tunnel import TunnelEntrance, TunnelExit, coordinator_socket, private_folder
from forerun.supervise.protocol.wire import LENGTH_BYTES, MAC_BYTES, Line, Refused, Secret, join

pytestmark = pytest.mark.timing

OURS = Secret(b"the secret of this run")
ATTEMPT = 3


class Rig:
    """A leader's port and a coordinator that echoes all bytes; `heard` has what reached the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.heard, self.port = folder, bytearray(), 0
        self.tunnels = TunnelExit(folder)
        self.writers: list[asyncio.StreamWriter] = []
        self.open = 0  # connections to the coordinator

    async def join(self, secret: Secret = OURS) -> Line:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return await join(reader, writer, secret)

    async def start_coordinator(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._echo, coordinator_socket(self.folder, ATTEMPT))

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                self.heard += data
                writer.write(data)
                await writer.drain()
        writer.close()
        self.open -= 1


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    with private_folder() as folder:
        made = Rig(Path(folder))
        limits, console = Limits(handshake=120, lost=120), Console("test")
        hosts = Hosts(0, 2, port=8476)
        listener = Listener(hosts, OURS, {}, limits, console, lambda event: None, dict, made.tunnels)
        made.port = await listener.open("127.0.0.1", 0)
        made.tunnels.begin(ATTEMPT)
        async with asyncio.timeout(120):
            yield made
            made.tunnels.end()
            for writer in made.writers:
                writer.close()
            while made.open:
                await asyncio.sleep(0.01)
        await listener.close(Ending(0))
        console.close()


@asynccontextmanager
async def entrance(connect: Callable[[], Awaitable[Line]]) -> AsyncIterator[Path]:
    """The socket on another host."""
    with private_folder() as folder:
        opened = TunnelEntrance(Path(folder), ATTEMPT, connect)
        await opened.open()
        yield coordinator_socket(Path(folder), ATTEMPT)
        await opened.close()
        assert list(Path(folder).iterdir()) == []


def test_carries_all_bytes_both_ways_also_if_the_coordinator_comes_late() -> None:
    content = secrets.token_bytes(3_000_000)

    async def scenario() -> bytes:
        async with rig() as made, entrance(made.join) as path:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(content)
            await asyncio.sleep(0.2)  # the leader looks for the coordinator meanwhile; the result does not depend on it
            server = await made.start_coordinator()
            echoed = await reader.readexactly(len(content))
            assert made.heard == content
            writer.close()
            server.close()
            return echoed

    assert asyncio.run(scenario()) == content


def test_ends_when_the_coordinator_ends_and_refuses_new_connections_then() -> None:
    async def scenario() -> None:
        async with rig() as made, entrance(made.join) as path:
            server = await made.start_coordinator()
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            server.close()
            coordinator_socket(made.folder, ATTEMPT).unlink(missing_ok=True)
            late, late_writer = await asyncio.open_unix_connection(path)
            assert await late.read() == b""
            made.tunnels.end()
            assert await reader.read() == b""
            writer.close()
            late_writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("attempt", [0, ATTEMPT - 1, ATTEMPT + 1, "3", None, float("inf")])
def test_a_worker_of_another_attempt_does_not_reach_the_coordinator(attempt: object) -> None:
    async def scenario() -> None:
        async with rig() as made:
            server = await made.start_coordinator()
            line = await made.join()
            line.send({"kind": "OpenTunnel", "attempt": attempt})
            line.send_bytes(b"late")
            with pytest.raises(EOFError):
                await line.receive_bytes()
            assert made.heard == b""
            server.close()

    asyncio.run(scenario())


def test_a_process_without_the_secret_does_not_reach_the_coordinator() -> None:
    async def scenario() -> None:
        async with rig() as made, entrance(lambda: made.join(Secret(b"the secret of another run"))) as path:
            server = await made.start_coordinator()
            with pytest.raises(Refused):
                await made.join(Secret(b"the secret of another run"))
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert made.heard == b""
            server.close()

    asyncio.run(scenario())


def test_a_changed_frame_does_not_reach_the_coordinator() -> None:
    async def scenario() -> None:
        async with rig() as made:
            server = await made.start_coordinator()
            line = await made.join()
            line.send({"kind": "OpenTunnel", "attempt": ATTEMPT})
            line.send_bytes(b"genuine")
            assert await line.receive_bytes() == b"genuine"
            line._writer.write((6).to_bytes(LENGTH_BYTES, "big") + bytes(MAC_BYTES) + b"forged")
            with pytest.raises(EOFError):
                await line.receive_bytes()
            assert made.heard == b"genuine"
            server.close()

    asyncio.run(scenario())


def test_the_socket_is_in_a_folder_that_only_its_user_can_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 200)
    deep.mkdir()
    for place in (str(tmp_path), str(deep)):
        monkeypatch.setattr("tempfile.tempdir", place)
        with private_folder() as folder:
            assert os.stat(folder).st_mode & 0o777 == 0o700
            assert os.stat(folder).st_uid == os.getuid()
            assert len(os.fsencode(coordinator_socket(Path(folder), 10**6))) < 104
        assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_to_the_socket() -> None:
    program = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    sys.exit(7)
"""

    async def scenario() -> int:
        async with rig() as made:
            server = await made.start_coordinator()
            path = str(coordinator_socket(made.folder, ATTEMPT))
            done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program, path], check=False)
            server.close()
            return done.returncode

    assert asyncio.run(scenario()) == 7
