"""The leader: it receives events from all hosts, calls `decide`, and executes the resulting actions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import StorageError
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.actions import (
    Action,
    AskForStacks,
    AskForUnits,
    CloseTunnels,
    EndWorkers,
    Finish,
    KeepStacks,
    Say,
    StartWorkers,
    StopWorkers,
    WriteLog,
)
from forerun.supervise.leader.decide import decide
from forerun.supervise.leader.host_file import HostFile
from forerun.supervise.leader.leader_view import Event, FinishedJob, LeaderSuspended, LeaderView, StartFailed, update
from forerun.supervise.leader.listener import Listener
from forerun.supervise.owner import Owner
from forerun.supervise.protocol.ending import Ending
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import AskStacks, AskUnits, EndWorker, LeaderBeat, StartWorker, StopAfter
from forerun.supervise.protocol.secret import Secret
from forerun.supervise.protocol.tunnel import TunnelExit
from forerun.supervise.slice_policy import SlicePolicy

# Minimum time between two decisions. Messages of many hosts that arrive meanwhile share one decision.
TURN_SECONDS = 0.02


class Leader:
    """The leader of a job. It runs on host 0. All decisions are made from `view`."""

    def __init__(
        self,
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        owner: Owner,
        folder: Path,
        limits: Limits,
        console: Console,
        policy: SlicePolicy | None = None,
    ) -> None:
        self._owner, self._limits, self._console = owner, limits, console
        self._began = time.monotonic()
        self._tunnels = TunnelExit(folder)
        self._host_file = HostFile(owner.folder.parent)
        self.view = LeaderView.at_start(hosts, limits, owner.attempt, str(owner.folder), self._began, policy)
        self.listener = Listener(
            hosts, secret, identity, limits, console, self._update, lambda: self.view.members, self._tunnels
        )

    async def run(self) -> Ending:
        """Run the job until it ends. Send the ending to every host and return it."""
        beats = asyncio.create_task(self._beat())
        try:
            while True:
                decision = decide(self.view, time.monotonic())
                self.view = decision.view
                self._host_file.update(self.view, time.monotonic())
                for action in decision.actions:
                    self._execute(action)
                if isinstance(self.view.phase, FinishedJob):
                    break
                await self._wait()
        finally:
            beats.cancel()
            self._host_file.close(self.view, time.monotonic())
        ending = self.view.phase.ending
        await self.listener.close(ending)
        return ending

    def _update(self, event: Event) -> None:
        self.view = update(self.view, event, time.monotonic())

    def _execute(self, action: Action) -> None:
        """Execute an action of a decision. `run` sends the ending of `Finish` when it closes the listener."""
        match action:
            case StartWorkers():
                self._start(action)
            case AskForUnits(hosts, seconds, ends_job):
                for host in hosts:
                    self.listener.send(host, AskUnits(seconds, ends_job))
            case StopWorkers(hosts, units, save, seconds, ends_job):
                for host in hosts:
                    self.listener.send(host, StopAfter(units, save, seconds, ends_job))
            case AskForStacks():
                self.listener.send_all(AskStacks())
            case KeepStacks(attempt, host, text):
                self._owner.keep_stacks(attempt, host, text)
            case EndWorkers(attempt):
                self.listener.send_all(EndWorker(attempt))
            case CloseTunnels():
                self._tunnels.end()
            case WriteLog(kind, about):
                self._log(kind, about)
            case Say(text):
                self._console.info(text)
            case Finish(ending):
                self._log("over", {"code": ending.code, "text": ending.text or ending.what})

    def _start(self, start: StartWorkers) -> None:
        """Start the workers of an attempt, after its number is on disk.

        The number identifies messages and tunnels of older attempts, so it must never be used twice.
        """
        try:
            stored = self._owner.next_attempt()
        except StorageError as error:
            self._update(StartFailed(error))
            return
        assert stored == start.attempt
        about = {} if start.slices is None else {"slices": start.slices}
        self._log("start", {"attempt": start.attempt, **about})
        self._tunnels.begin(start.attempt)
        for index, host in enumerate(start.hosts):
            self.listener.send(host, StartWorker(start.attempt, index, len(start.hosts), start.slices))

    async def _wait(self) -> None:
        """Wait for an event, for the deadline of the phase, or for one beat."""
        began = time.monotonic()
        deadline = getattr(self.view.phase, "until", math.inf)
        await self.listener.changed(min(self._limits.beat, max(0.0, deadline - began)))
        await asyncio.sleep(TURN_SECONDS)
        # This process may have been suspended, for example by Ctrl-Z. It has not read the messages that the hosts sent
        # meanwhile, so the hosts must not count as silent.
        away = time.monotonic() - began - self._limits.beat - TURN_SECONDS
        if away > self._limits.beat:
            self._update(LeaderSuspended(away))

    async def _beat(self) -> None:
        while True:
            self.listener.send_all(LeaderBeat())
            await asyncio.sleep(self._limits.beat)

    def _log(self, kind: str, about: Mapping[str, Any]) -> None:
        """Write a record with the time since the start of the leader."""
        seconds = round(time.monotonic() - self._began, 3)
        self._owner.append_log({"kind": kind, "seconds": seconds, "unix_seconds": round(time.time(), 3), **about})
