"""One host's part: holds the line to the leader, runs one worker at a time, and ends it when the line is lost."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.errors import UserError
from forerun.supervise.child import Child
from forerun.supervise.ending import Ending
from forerun.supervise.hosts import Hosts
from forerun.supervise.limits import STOPPED, Limits
from forerun.supervise.secret import VARIABLE as SECRET_VARIABLE
from forerun.supervise.secret import Secret
from forerun.supervise.tunnel import TunnelEntrance, coordinator_socket
from forerun.supervise.voice import Voice
from forerun.supervise.wire import Line, NotForerun, Refused, join
from forerun.units import Seconds

TRIES = 3  # before a refusal is believed
BUSY_SECONDS = 4.0
STACK_CHARACTERS = 60_000


class Agent:
    def __init__(
        self,
        command: Sequence[str],
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        folder: Path,
        limits: Limits,
        voice: Voice,
        before_start: Callable[[], None],
        spare: bool,
    ) -> None:
        self._command, self._hosts, self._secret = list(command), hosts, secret
        self._identity, self._limits, self._voice = dict(identity), limits, voice
        self._folder, self._before_start = folder, before_start
        self._environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        self._instance = secrets.token_hex(8)
        self._line: Line | None = None
        self._child: Child | None = None
        self._spare: Child | None = None
        self._tunnel: TunnelEntrance | None = None
        self._spared: float = 0 if spare else math.inf  # the newest attempt that got a spare
        self._turn = asyncio.Lock()  # one start or end at a time
        self._attempt = 0
        self._cpu: deque[tuple[float, float]] = deque(maxlen=64)
        self._announced: tuple[str, float] | None = None  # why, until when
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Ending:
        """Until the leader says that it is over, or stays away for too long."""
        limit = self._limits.gather
        try:
            while True:
                line = await self._connect(limit)
                if line is None:
                    return Ending(STOPPED, "stopped as asked, with no leader in reach")
                ending = await self._follow(line)
                if ending is not None:
                    return ending
                if self._stopping:
                    return Ending(STOPPED, "stopped as asked")
                await self._end_child()
                limit = self._limits.reconnect
                self._voice.say(f"lost the leader at {self._hosts.address}; the worker is ended, trying again")
        finally:
            await self._end_child()
            if self._spare is not None:
                await self._spare.end()

    def announce(self, why: str, grace_seconds: float) -> None:
        """A stop was announced to this host: by a signal, or by the cloud."""
        until = time.monotonic() + grace_seconds
        if self._announced is None or until < self._announced[1]:
            self._announced = (why, until)
            self._pass_on()

    def _pass_on(self) -> None:
        if self._line is not None and self._announced is not None:
            why, until = self._announced
            self._line.send({"kind": "asked", "why": why, "seconds": until - time.monotonic()})

    # The line

    async def _connect(self, limit_seconds: float) -> Line | None:
        """None if a stop was announced and the leader is not there."""
        began, pause, refusals = time.monotonic(), 0.1, 0
        why = "no answer"
        while time.monotonic() - began < limit_seconds:
            if self._announced and time.monotonic() - began > self._limits.lost:
                return None
            try:
                return await self._join()
            except Refused as error:
                refusals, why = refusals + 1, str(error)
                if refusals >= TRIES:
                    raise self._refused(error) from error
            except TimeoutError:
                why = f"no answer within {Seconds(self._limits.handshake)}"
            except (OSError, EOFError) as error:
                why = str(error) or type(error).__name__
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        raise UserError(
            f"host {self._hosts.index} cannot reach the leader at {self._hosts.address}",
            why=f"tried for {Seconds(limit_seconds)}: {why}",
            fix="is host 0 running, is this its address inside the cluster, and does a firewall let the port through?",
        )

    async def _join(self) -> Line:
        """Open an authenticated line to the leader."""
        async with asyncio.timeout(self._limits.handshake):
            reader, writer = await asyncio.open_connection(self._hosts.leader, self._hosts.port)
            try:
                return await join(reader, writer, self._secret)
            except BaseException:
                writer.close()
                raise

    def _refused(self, error: Refused) -> UserError:
        where = self._hosts.address
        if isinstance(error, NotForerun):
            return UserError(
                f"what answers at {where} is not a forerun leader",
                why=str(error),
                fix="give the address and port of host 0's supervisor",
            )
        return UserError(
            f"the leader at {where} has another secret than host {self._hosts.index}",
            why=str(error),
            fix="copy the leader's secret to this host, and see that it is the same run",
        )

    async def _follow(self, line: Line) -> Ending | None:
        """Do as the leader says; None when the line is lost."""
        self._line = line
        line.send(
            {
                "kind": "hello",
                "index": self._hosts.index,
                "count": self._hosts.count,
                "instance": self._instance,
                "name": socket.gethostname(),
                "pid": os.getpid(),
                "identity": self._identity,
            }
        )
        self._pass_on()
        beats = asyncio.create_task(self._beat(line))
        try:
            while True:
                async with asyncio.timeout(self._limits.lost):
                    message = await line.receive()
                if message["kind"] == "over":
                    await self._end_child()
                    return Ending.told(message)
                self._obey(message)
        except (TimeoutError, EOFError, Refused):
            return None
        finally:
            beats.cancel()
            self._line = None
            line.close()

    async def _beat(self, line: Line) -> None:
        while True:
            child = self._child
            if child is None or child.exit is not None:
                line.send({"kind": "beat"})
            else:
                view = child.view()
                self._cpu.append((time.monotonic(), view.cpu_seconds))
                if view.step_seconds and not self._stopping:
                    self._do(self._keep_spare())
                line.send({"kind": "beat", "attempt": self._attempt, "view": asdict(view), "facts": child.facts})
            began = time.monotonic()
            await asyncio.sleep(self._limits.beat)
            now = time.monotonic()
            if self._child is not None and (away := now - began - self._limits.beat) > self._limits.beat:
                self._child.progress.excuse(away, now)

    # The leader's wishes

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "start":
            self._do(self._start(message))
        elif kind == "end":
            self._do(self._end(message))
        elif kind == "stacks":
            self._do(self._stacks())
        elif kind in ("ask", "decide"):
            self._stopping = True
            self._do(self._pass_stop(message))

    def _do(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _say(self, message: dict[str, Any]) -> None:
        if self._line is not None:
            self._line.send({**message, "attempt": self._attempt})

    async def _start(self, message: dict[str, Any]) -> None:
        async with self._turn:
            await self._started(message)

    async def _started(self, message: dict[str, Any]) -> None:
        await self._ended()
        self._attempt = int(message["attempt"])
        try:
            self._before_start()
            await self._open_tunnel()
        except UserError as error:
            self._say({"kind": "mistake", "what": error.what, "why": error.why, "fix": error.fix})
            return
        self._cpu.clear()
        about = {
            "attempt": self._attempt,
            "index": self._hosts.index,
            "hosts": self._hosts.count,
            "coordinator": f"unix:{coordinator_socket(self._folder, self._attempt)}",
        }
        child, self._spare = self._spare, None
        if child is not None and not child.dead:
            child.begin(about)
        else:
            child = Child(self._limits, self._heard, self._voice)
            await child.start(self._command, self._environment, about)
        self._child = child
        self._reporting = asyncio.create_task(self._report(child, self._attempt))

    async def _open_tunnel(self) -> None:
        """Listen where this host's worker will look for the coordinator. On host 0 the worker itself listens there."""
        if self._hosts.leads:
            return
        tunnel = TunnelEntrance(self._folder, self._attempt, self._join)
        try:
            await tunnel.open()
        except OSError as error:
            raise UserError(
                f"the supervisor cannot listen in {self._folder}",
                why=str(error.strerror),
                fix="start the hosts again; if it happens again, set TMPDIR to another folder on a local disk",
            ) from error
        self._tunnel = tunnel

    async def _keep_spare(self) -> None:
        """The next worker, once the present one makes steps: most of a start is imports, which need not wait for it."""
        async with self._turn:
            if self._spared < self._attempt:
                self._spared = self._attempt
                spare = Child(self._limits, self._heard, self._voice)
                await spare.start(self._command, self._environment)
                self._spare = spare

    async def _report(self, child: Child, attempt: int) -> None:
        await child.left.wait()
        if child.exit is not None and attempt == self._attempt:
            if child.exit.code == -signal.SIGTERM and not child.exit.ended:  # before it could listen to signals
                self.announce(f"SIGTERM to the worker of host {self._hosts.index}", self._limits.grace)
            self._say({"kind": "exited", **asdict(child.exit), "step": child.progress.step})

    async def _end(self, message: dict[str, Any]) -> None:
        await self._end_child()
        if self._line is not None:
            self._line.send({"kind": "idle", "attempt": message["attempt"]})

    async def _pass_stop(self, message: dict[str, Any]) -> None:
        """To the worker, once it is started. For one that has not come so far as to listen, the answer is known."""
        async with self._turn:
            child = self._child
        if message["kind"] == "ask" and (child is None or not child.connected):
            self._say({"kind": "begun", "units": 0})
        if child is not None:
            child.send(message)

    async def _stacks(self) -> None:
        child = self._child
        if child is None:
            return
        text = await child.stacks()
        frames = child.main_stack(text)[:20]
        with suppress(ValueError):
            self._say({"kind": "stacks", "text": text[:STACK_CHARACTERS], "frames": frames, "busy": self._busy()})

    def _busy(self) -> float:
        """Cores that the worker used lately."""
        recent = [sample for sample in self._cpu if sample[0] > time.monotonic() - BUSY_SECONDS]
        if len(recent) < 2:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    def _heard(self, message: dict[str, Any]) -> None:
        if message["kind"] == "sigterm":
            self.announce(f"SIGTERM to the worker of host {self._hosts.index}", self._limits.grace)
        else:
            self._say(message)

    async def _end_child(self) -> None:
        async with self._turn:
            await self._ended()

    async def _ended(self) -> None:
        if self._child is not None:
            await self._child.end()
            await self._reporting
            self._child = None
        if self._tunnel is not None:
            await self._tunnel.close()
            self._tunnel = None
