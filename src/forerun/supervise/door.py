"""The leader's door: lets in who knows the secret and is who is expected; strangers are named once and ignored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from forerun.errors import UserError
from forerun.supervise import verdicts
from forerun.supervise.ending import Ending
from forerun.supervise.hosts import Hosts
from forerun.supervise.limits import Limits
from forerun.supervise.member import Member
from forerun.supervise.secret import Secret
from forerun.supervise.tunnel import TunnelExit
from forerun.supervise.voice import Voice
from forerun.supervise.wire import Line, Refused, admit

MOST_KNOCKING = 16  # from one address at a time; hosts try again
MOST_ADDRESSES = 4096
MOST_STRANGERS = 100
LEAVING_SECONDS = 5.0


@dataclass(frozen=True)
class Hello:
    """The first message of a host's supervisor."""

    index: int
    count: int
    instance: str
    name: str
    pid: int
    identity: Mapping[str, str]

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Self:
        """Return the message as a Hello, or raise Refused if a field is missing or has no valid value."""
        kinds = {"index": int, "count": int, "instance": str, "name": str, "pid": int, "identity": dict}
        for name, kind in kinds.items():
            if not isinstance(message.get(name), kind):
                raise Refused(f"its first message has no valid '{name}'")
        if not 0 <= message["index"] < message["count"]:
            raise Refused("its first message has an index that is out of range")
        return cls(**{name: message[name] for name in kinds})


class Door:
    """`mistake` is set when somebody came in who shows that the job cannot run."""

    def __init__(
        self,
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        limits: Limits,
        voice: Voice,
        hear: Callable[[Member, dict[str, Any]], None],
        tunnels: TunnelExit,
    ) -> None:
        self._hosts, self._secret, self._identity = hosts, secret, dict(identity)
        self._limits, self._voice, self._hear, self._tunnels = limits, voice, hear, tunnels
        self._changed = asyncio.Event()
        self._knocking: Counter[str] = Counter()
        self._strangers: dict[str, str] = {}
        self._server: asyncio.Server | None = None
        self.members: dict[int, Member] = {}
        self.mistake: UserError | None = None

    async def open(self, bound: str, port: int) -> int:
        """Listens on this one address; the port, if any was to be found."""
        try:
            self._server = await asyncio.start_server(self._knock, bound, port)
        except OSError as error:
            raise UserError(
                f"host 0 cannot listen on {bound} port {port}",
                why=str(error.strerror),
                fix="another process has the port: end it, or give all hosts another port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def changed(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def strangers(self) -> str:
        return "; ".join(f"refused {address}: {why}" for address, why in self._strangers.items())

    async def close(self, ending: Ending) -> None:
        """Tells everybody, and waits a moment until they have left."""
        if self._server is not None:
            self._server.close()
        for member in self.members.values():
            member.send(ending.message())
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_SECONDS):
                while any(member.line is not None for member in self.members.values()):
                    await self.changed(0.1)

    async def _knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("somebody",))[0])
        if self._knocking[address] >= MOST_KNOCKING or len(self._knocking) > MOST_ADDRESSES:
            writer.close()
            return
        self._knocking[address] += 1
        try:
            async with asyncio.timeout(self._limits.handshake):
                line = await admit(reader, writer, self._secret)
                first = await line.receive()
                tunnel = first.get("kind") == "tunnel"
                member = None if tunnel else self._admitted(line, Hello.parse(first))
        except (Refused, EOFError, TimeoutError) as error:
            self._refuse(address, str(error) or "it said nothing")
            writer.close()
            return
        finally:
            self._knocking -= Counter([address])
        if member is not None:
            await self._listen(member, line)
        elif tunnel:
            await self._tunnels.serve(line, first.get("attempt"))
        await line.drain()
        line.close()

    def _refuse(self, address: str, why: str) -> None:
        if address not in self._strangers and len(self._strangers) < MOST_STRANGERS:
            self._strangers[address] = why
            self._voice.say(f"refused a connection from {address}: {why}")

    def _admitted(self, line: Line, hello: Hello) -> Member | None:
        """The newcomer as a member, or None after telling it why not."""
        index, count, name, pid = hello.index, hello.count, hello.name, hello.pid
        before = self.members.get(index)
        mistake: UserError | None = None
        if count != self._hosts.count:
            mistake = UserError(
                f"host {index} counts {count} hosts, the leader {self._hosts.count}",
                why=f"host {index} is process {pid} on {name}",
                fix="give every host the same number of hosts",
            )
        elif before is not None and before.instance != hello.instance and self._present(before):
            mistake = verdicts.twice(before, name, pid)
            self._strangers[f"a second host {index}"] = f"process {pid} on {name}"
            self._voice.say(mistake.what + f": {mistake.why}")
        else:
            mistake = self._mismatch(index, hello.identity)
            self.mistake = self.mistake or mistake  # who comes next, before it was looked at, does not undo it
        if mistake is not None:
            line.send(Ending.mistake(mistake).message())
            self._changed.set()
            return None
        member = Member(index, hello.instance, name, pid, line)
        if before is not None:
            if before.line is not None:
                before.line.close()
            member.step = before.step
        self.members[index] = member
        self._changed.set()
        return member

    def _present(self, member: Member) -> bool:
        """A host that was restarted may come back before its old line is known to be lost."""
        return member.line is not None and member.silent_seconds() < 3 * self._limits.beat

    def _mismatch(self, index: int, identity: Mapping[str, str]) -> UserError | None:
        for name in sorted({*self._identity, *identity}):
            mine, theirs = self._identity.get(name, "none"), str(identity.get(name, "none"))
            if mine != theirs:
                return verdicts.difference(name, {0: mine, index: theirs})
        return None

    async def _listen(self, member: Member, line: Line) -> None:
        try:
            while True:
                async with asyncio.timeout(self._limits.lost):
                    message = await line.receive()
                self._hear(member, message)
                self._changed.set()
        except (EOFError, TimeoutError, Refused, KeyError, TypeError, ValueError, OverflowError):
            if member.line is line:
                member.line = None
            self._changed.set()
