"""The leader's port. It admits hosts that know the secret, rejects all other peers and reports each address once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from forerun.errors import UserError
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.leader_view import (
    Event,
    HostDisconnected,
    HostJoined,
    Member,
    MessageReceived,
    MistakeFound,
    PeerRefused,
)
from forerun.supervise.leader.verdicts import difference, twice
from forerun.supervise.protocol.json_form import InvalidMessage, decode_first, decode_from_host, encode
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import Ending, Hello, Message, OpenTunnel, StartFailure, StopNotice
from forerun.supervise.protocol.tunnel import TunnelExit
from forerun.supervise.protocol.wire import Line, Refused, Secret, admit

MAX_PENDING_CONNECTIONS = 16  # not yet authenticated, from one address; a host that is rejected tries again
MAX_ADDRESSES = 4096
MAX_REFUSED_PEERS = 100
LEAVING_SECONDS = 5.0


class Listener:
    """The connections of all hosts. It reports what happens on them as events.

    Args:
        identity: The values that every host must share, such as versions.
        emit: Receives the events.
        members: Returns the hosts that the leader knows.
        tunnels: Takes over the connections that are tunnels.
    """

    def __init__(
        self,
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        limits: Limits,
        console: Console,
        emit: Callable[[Event], None],
        members: Callable[[], Mapping[int, Member]],
        tunnels: TunnelExit,
    ) -> None:
        self._hosts, self._secret, self._identity = hosts, secret, dict(identity)
        self._limits, self._console, self._tunnels = limits, console, tunnels
        self._report, self._members = emit, members
        self._changed = asyncio.Event()
        self._pending_connections: Counter[str] = Counter()
        self._refused: set[str] = set()
        self._server: asyncio.Server | None = None
        self._lines: dict[int, Line] = {}

    async def open(self, bound: str, port: int) -> int:
        """Listen on the address `bound` only, and return the port. The port 0 selects a free one."""
        try:
            self._server = await asyncio.start_server(self._accept, bound, port)
        except OSError as error:
            raise UserError(
                "E-HOSTS-006",
                f"host 0 cannot listen on {bound} port {port}",
                why=str(error.strerror),
                fix="another process uses the port: end it, or give all hosts another port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def changed(self, seconds: float) -> None:
        """Wait for the next event, but at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def send(self, message: Message, hosts: Collection[int] | None = None) -> None:
        """Send a message to those of these hosts that are connected; None: to every one."""
        content = encode(message)
        for index in sorted(self._lines):
            if hosts is None or index in hosts:
                self._lines[index].send(content)

    async def close(self, ending: Ending) -> None:
        """Send `ending` to all hosts, and wait until they have disconnected, at most LEAVING_SECONDS."""
        if self._server is not None:
            self._server.close()
        self.send(ending)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_SECONDS):
                while self._lines:
                    await self.changed(0.1)

    def _emit(self, event: Event) -> None:
        self._report(event)
        self._changed.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Authenticate a new connection, then serve it as a host or as a tunnel."""
        address = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        pending = self._pending_connections
        if pending[address] >= MAX_PENDING_CONNECTIONS or len(pending) > MAX_ADDRESSES:
            writer.close()
            return
        pending[address] += 1
        try:
            async with asyncio.timeout(self._limits.handshake):
                line = await admit(reader, writer, self._secret)
                first = decode_first(await line.receive())
                admitted = isinstance(first, Hello) and self._admit(line, first)
        except (Refused, InvalidMessage, EOFError, TimeoutError) as error:
            self._refuse(address, str(error) or "it sent no message")
            writer.close()
            return
        finally:
            self._pending_connections -= Counter([address])
        match first:
            case Hello(index) if admitted:
                await self._receive(index, line)
            case OpenTunnel(attempt):
                await self._tunnels.serve(line, attempt)
        await line.drain()
        line.close()

    def _refuse(self, address: str, why: str) -> None:
        """Report a rejected peer, once per address. The number of reported addresses is limited."""
        if address not in self._refused and len(self._refused) < MAX_REFUSED_PEERS:
            self._refused.add(address)
            self._emit(PeerRefused(address, why))
            self._console.info(f"refused a connection from {address}: {why}")

    def _admit(self, line: Line, hello: Hello) -> bool:
        """Admit a host and return True, or send it the reason and return False."""
        mistake = self._mistake_of(hello)
        if mistake is not None:
            line.send(encode(Ending.mistake(mistake)))
            return False
        before = self._lines.get(hello.index)
        if before is not None:
            before.close()
        self._lines[hello.index] = line
        self._emit(HostJoined(hello))
        return True

    def _mistake_of(self, hello: Hello) -> UserError | None:
        """Return why a host cannot be admitted, or None. A difference between the hosts also ends the job."""
        index, before = hello.index, self._members().get(hello.index)
        if hello.count != self._hosts.count:
            return UserError(
                "E-HOSTS-007",
                f"host {index} was started with {hello.count} hosts, the leader with {self._hosts.count}",
                why=f"host {index} is process {hello.pid} on {hello.name}",
                fix="give every host the same number of hosts",
            )
        if before is not None and before.instance != hello.instance and self._is_present(before):
            second = twice(before, hello.name, hello.pid)
            self._emit(PeerRefused(f"a second host {index}", f"process {hello.pid} on {hello.name}"))
            self._console.info(second.what + f": {second.why}")
            return second
        difference = self._difference(index, hello.identity)
        if difference is not None:
            self._emit(MistakeFound(difference))
        return difference

    def _is_present(self, member: Member) -> bool:
        """Return whether the host sent a message recently.

        A restarted supervisor may connect before the leader has noticed that its old connection is lost.
        """
        return member.connected and member.silent_seconds(time.monotonic()) < 3 * self._limits.beat

    def _difference(self, index: int, identity: Mapping[str, str]) -> UserError | None:
        """Return the error for the first value in which a host differs from the leader, or None."""
        for name in sorted({*self._identity, *identity}):
            mine, theirs = self._identity.get(name, "none"), identity.get(name, "none")
            if mine != theirs:
                return difference(name, {0: mine, index: theirs})
        return None

    async def _receive(self, index: int, line: Line) -> None:
        """Report the messages of a host until its connection closes.

        If a new connection of the host has replaced this one, only stops and failed starts still count.
        """
        try:
            while True:
                async with asyncio.timeout(self._limits.lost):
                    message = decode_from_host(await line.receive())
                if self._lines.get(index) is line or isinstance(message, StopNotice | StartFailure):
                    self._emit(MessageReceived(index, message))
        except (EOFError, TimeoutError, Refused, InvalidMessage):
            if self._lines.get(index) is line:
                del self._lines[index]
                self._emit(HostDisconnected(index))
