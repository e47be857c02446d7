"""The supervisor of one host. It executes the leader's orders, and ends its worker if it loses the leader."""

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
from typing import Any, assert_never

from forerun.errors import UserError
from forerun.exit_codes import STOPPED
from forerun.supervise.child import Child
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.json_form import InvalidMessage, decode_from_leader, encode
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    AskStacks,
    AskUnits,
    Begin,
    Ending,
    EndWorker,
    Exited,
    FromLeader,
    Hello,
    HostBeat,
    HostStacks,
    HostUnits,
    Idle,
    LeaderBeat,
    Message,
    Sigterm,
    StartFailure,
    StartWorker,
    StopAfter,
    StopNotice,
    WorkerUnits,
)
from forerun.supervise.protocol.tunnel import TunnelEntrance, coordinator_socket
from forerun.supervise.protocol.wire import SECRET_VARIABLE, Line, NotForerun, Refused, Secret, join
from forerun.units import Seconds

TRIES = 3  # refused connections, until this host gives up
BUSY_SECONDS = 4.0  # in which the CPU time of the worker is measured
STACK_CHARACTERS = 60_000


class Agent:
    """The supervisor of one host.

    Args:
        command: The command of the worker.
        identity: The values that every host must share, such as versions.
        folder: A private folder for Unix sockets.
        before_start: Called before each start of a worker. A UserError prevents the start and ends the job.
        spare: Whether to keep a second worker ready, which becomes the worker of the next attempt.
        variables: Returns the variables that the worker of an attempt gets in addition to the environment of this
            process.
    """

    def __init__(
        self,
        command: Sequence[str],
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        folder: Path,
        limits: Limits,
        console: Console,
        before_start: Callable[[], None],
        spare: bool,
        variables: Callable[[StartWorker], Mapping[str, str]] = lambda order: {},
    ) -> None:
        self._command, self._hosts, self._secret = list(command), hosts, secret
        self._identity, self._limits, self._console = dict(identity), limits, console
        self._folder, self._before_start = folder, before_start
        self._environment = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
        self._variables = variables
        self._instance = secrets.token_hex(8)
        self._line: Line | None = None
        self._child: Child | None = None
        self._spare: Child | None = None
        self._tunnel: TunnelEntrance | None = None
        self._spared: float = 0 if spare else math.inf  # the newest attempt for which a spare was started
        self._turn = asyncio.Lock()  # a worker is started or ended by one task at a time
        self._attempt = 0
        self._cpu: deque[tuple[float, float]] = deque(maxlen=64)
        self._announced: tuple[str, float] | None = None  # the reason and the deadline of a stop
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> Ending:
        """Follow the leader until it ends the job, and return the ending.

        Raises:
            UserError: The leader cannot be reached within the time limit, or it refuses this host.
        """
        limit = self._limits.gather
        try:
            while True:
                line = await self._connect(limit)
                if line is None:
                    return Ending(STOPPED, "stopped as asked; the leader could not be reached")
                ending = await self._follow(line)
                if ending is not None:
                    return ending
                if self._stopping:
                    return Ending(STOPPED, "stopped as asked")
                await self._end_child()
                limit = self._limits.reconnect
                self._console.info(f"lost the leader at {self._hosts.address}; ended the worker, connecting again")
        finally:
            await self._end_child()
            if self._spare is not None:
                await self._spare.end()

    def announce(self, why: str, grace_seconds: float) -> None:
        """Report a stop that a signal or the cloud announced. A later deadline than the known one is ignored."""
        until = time.monotonic() + grace_seconds
        if self._announced is None or until < self._announced[1]:
            self._announced = (why, until)
            self._pass_on()

    def _pass_on(self) -> None:
        """Send the announced stop to the leader, if there is one."""
        if self._announced is not None:
            why, until = self._announced
            self._send(StopNotice(why, until - time.monotonic()))

    def _send(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(encode(message))

    # The connection to the leader

    async def _connect(self, limit_seconds: float) -> Line | None:
        """Return a line to the leader, or None if a stop was announced and the leader does not answer."""
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
            "E-HOSTS-001",
            f"host {self._hosts.index} cannot reach the leader at {self._hosts.address}",
            why=f"tried for {Seconds(limit_seconds)}: {why}",
            fix="check that host 0 runs, that this is its address in the cluster, and that no firewall blocks the port",
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
        """Return the error for a leader that refuses this host."""
        where = self._hosts.address
        if isinstance(error, NotForerun):
            return UserError(
                "E-HOSTS-002",
                f"the program at {where} is not a forerun leader",
                why=str(error),
                fix="give the address and port of host 0's supervisor",
            )
        return UserError(
            "E-HOSTS-003",
            f"the leader at {where} has another secret than host {self._hosts.index}",
            why=str(error),
            fix="copy the leader's secret to this host, and check that both belong to the same run",
        )

    async def _follow(self, line: Line) -> Ending | None:
        """Execute the leader's orders. Return the end of the job, or None when the connection is lost."""
        self._line = line
        index, count = self._hosts.index, self._hosts.count
        self._send(Hello(index, count, self._instance, socket.gethostname(), os.getpid(), self._identity))
        self._pass_on()
        beats = asyncio.create_task(self._beat())
        try:
            while True:
                async with asyncio.timeout(self._limits.lost):
                    message = decode_from_leader(await line.receive())
                if isinstance(message, Ending):
                    await self._end_child()
                    return message
                self._obey(message)
        except (TimeoutError, EOFError, Refused, InvalidMessage):
            return None
        finally:
            beats.cancel()
            self._line = None
            line.close()

    async def _beat(self) -> None:
        """Send beats. If this process was suspended, do not count that time as a stall of the worker."""
        while True:
            self._send_beat()
            began = time.monotonic()
            await asyncio.sleep(self._limits.beat)
            now = time.monotonic()
            if self._child is not None and (away := now - began - self._limits.beat) > self._limits.beat:
                self._child.progress.excuse(away, now)

    def _send_beat(self) -> None:
        """Send the progress of the worker, and start a spare once the worker makes steps."""
        child = self._child
        if child is None or child.exit is not None:
            self._send(HostBeat())
            return
        view = child.view()
        self._cpu.append((time.monotonic(), view.cpu_seconds))
        if view.step_seconds and not self._stopping:
            self._do(self._keep_spare())
        self._send(HostBeat(self._attempt, view, child.facts))

    # The leader's orders

    def _obey(self, message: FromLeader) -> None:
        """Start the execution of an order. It must not block, so that further orders and beats are received."""
        match message:
            case LeaderBeat():
                pass
            case StartWorker():
                self._do(self._start(message))
            case EndWorker(attempt):
                self._do(self._end(attempt))
            case AskStacks():
                self._do(self._stacks())
            case AskUnits() | StopAfter():
                self._stopping = self._stopping or message.ends_job
                self._do(self._pass_stop(message))
            case Ending():
                raise AssertionError("the caller ends the connection")
            case _:
                assert_never(message)

    def _do(self, work: Any) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, order: StartWorker) -> None:
        async with self._turn:
            await self._started(order)

    async def _started(self, order: StartWorker) -> None:
        """Start the worker of an attempt, from the spare if there is one. The caller holds `_turn`."""
        await self._ended()
        self._attempt = attempt = order.attempt
        try:
            self._before_start()
            await self._open_tunnel()
        except UserError as error:
            self._send(StartFailure(**error.parts(), attempt=attempt))
            return
        self._cpu.clear()
        coordinator = f"unix:{coordinator_socket(self._folder, attempt)}"
        begin = Begin(attempt, order.index, order.hosts, coordinator, order.slices, self._variables(order))
        child, self._spare = self._spare, None
        if child is not None and not child.dead:
            child.begin(begin)
        else:
            child = Child(self._limits, self._heard, self._console)
            await child.start(self._command, self._environment, begin)
        self._child = child
        self._reporting = asyncio.create_task(self._report(child, attempt))

    async def _open_tunnel(self) -> None:
        """Listen at the address where this host's worker connects to the coordinator.

        On host 0, the worker itself listens there.
        """
        if self._hosts.leads:
            return
        tunnel = TunnelEntrance(self._folder, self._attempt, self._join)
        try:
            await tunnel.open()
        except OSError as error:
            raise UserError(
                "E-HOSTS-004",
                f"the supervisor cannot listen in {self._folder}",
                why=str(error.strerror),
                fix="start the hosts again; if it happens again, set TMPDIR to another folder on a local disk",
            ) from error
        self._tunnel = tunnel

    async def _keep_spare(self) -> None:
        """Start one spare per attempt. It makes a restart faster, because imports take most of the time of a start."""
        async with self._turn:
            if self._spared < self._attempt:
                self._spared = self._attempt
                spare = Child(self._limits, self._heard, self._console)
                await spare.start(self._command, self._environment)
                self._spare = spare

    async def _report(self, child: Child, attempt: int) -> None:
        """Report the exit of the worker to the leader."""
        await child.left.wait()
        if child.exit is not None and attempt == self._attempt:
            if child.exit.code == -signal.SIGTERM and not child.exit.ended:  # it had no handler yet
                self.announce(f"SIGTERM to the worker of host {self._hosts.index}", self._limits.grace)
            self._send(Exited(**asdict(child.exit), step=child.progress.step, attempt=attempt))

    async def _end(self, attempt: int) -> None:
        """End the worker, and confirm it to the leader."""
        await self._end_child()
        self._send(Idle(attempt))

    async def _pass_stop(self, message: AskUnits | StopAfter) -> None:
        """Forward a message to the worker, after its start. A worker that is not connected yet has begun no unit."""
        async with self._turn:
            child = self._child
        if isinstance(message, AskUnits) and (child is None or not child.connected):
            self._send(HostUnits(0, self._attempt))
        if child is not None:
            child.send(message)

    async def _stacks(self) -> None:
        """Send the stacks of the worker to the leader. They are truncated to fit into a frame."""
        child = self._child
        if child is None:
            return
        text = await child.stacks()
        frames = child.main_stack(text)[:20]
        with suppress(ValueError):
            self._send(HostStacks(text[:STACK_CHARACTERS], tuple(frames), self._busy(), self._attempt))

    def _busy(self) -> float:
        """Return the number of cores that the worker used recently."""
        recent = [sample for sample in self._cpu if sample[0] > time.monotonic() - BUSY_SECONDS]
        if len(recent) < 2:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    def _heard(self, message: WorkerUnits | Sigterm) -> None:
        """Forward a message of the worker to the leader."""
        if isinstance(message, Sigterm):
            self.announce(f"SIGTERM to the worker of host {self._hosts.index}", self._limits.grace)
            return
        # With this answer, the leader decides whether a save fits. So the beat with the latest save time goes first.
        self._send_beat()
        self._send(HostUnits(message.units, self._attempt))

    async def _end_child(self) -> None:
        async with self._turn:
            await self._ended()

    async def _ended(self) -> None:
        """End the worker and its tunnel, if they exist. The caller holds `_turn`."""
        if self._child is not None:
            await self._child.end()
            await self._reporting
            self._child = None
        if self._tunnel is not None:
            await self._tunnel.close()
            self._tunnel = None
