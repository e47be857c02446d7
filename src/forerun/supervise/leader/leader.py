"""The leader: it receives events from all hosts, calls `decide`, and executes the resulting actions."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import StorageError
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.actions import (
    Action,
    CloseTunnels,
    Finish,
    KeepStacks,
    Say,
    Send,
    StartWorkers,
    WriteLog,
)
from forerun.supervise.leader.decide import decide
from forerun.supervise.leader.leader_view import Event, FinishedJob, LeaderSuspended, LeaderView, StartFailed, update
from forerun.supervise.leader.listener import Listener
from forerun.supervise.owner import Owner
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    Ending,
    LeaderBeat,
    StartWorker,
)
from forerun.supervise.protocol.tunnel import TunnelExit
from forerun.supervise.protocol.wire import Secret
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
            case Send(message, hosts):
                self.listener.send(message, hosts)
            case KeepStacks(attempt, host, text):
                self._owner.keep_stacks(attempt, host, text)
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
            self.listener.send(StartWorker(start.attempt, index, len(start.hosts), start.slices), (host,))

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
            self.listener.send(LeaderBeat())
            await asyncio.sleep(self._limits.beat)

    def _log(self, kind: str, about: Mapping[str, Any]) -> None:
        """Write a record with the time since the start of the leader."""
        seconds = round(time.monotonic() - self._began, 3)
        self._owner.append_log({"kind": kind, "seconds": seconds, "unix_seconds": round(time.time(), 3), **about})


NAME = "hosts.json"
EVERY_SECONDS = 2.0  # at least, between two writes


def hosts_content(view: LeaderView, now: float, unix_seconds: float) -> dict[str, Any]:
    """Return the content of `hosts.json`.

    Args:
        view: The state of the leader.
        now: The time of its monotonic clock.
        unix_seconds: The time of the wall clock.
    """
    # Before the first attempt, all hosts that are connected.
    members = view.ordered_members() or [view.members[index] for index in sorted(view.members)]
    slices = view.policy.count_of(view.taking_part)
    first = view.reached_step()
    return {
        "unix_seconds": round(unix_seconds, 3),
        "attempt": view.attempt,
        **({} if slices is None else {"slices": slices, "of_slices": view.policy.slices}),
        "hosts": [
            {
                "index": member.index,
                "name": member.name,
                "phase": member.view.phase,
                "step": member.step,
                "lag": first - member.step,
                "save_seconds": member.view.save_seconds,
                "memory": member.view.memory,
                "memory_bytes": member.view.memory_bytes,
                "memory_limit_bytes": member.view.memory_limit_bytes,
                "age_seconds": round(max(0.0, member.silent_seconds(now)), 3),
            }
            for member in members
        ],
    }


class HostFile:
    """The thread that writes `hosts.json`, at most every `EVERY_SECONDS`.

    Args:
        run: The folder of the run.
        write: Writes a text to a path. Tests replace it.
    """

    def __init__(self, run: Path, write: Callable[[Path, str], None] | None = None) -> None:
        self._path, self._write = run / NAME, write or replace_file
        self._content: Mapping[str, Any] | None = None
        self._due = -EVERY_SECONDS
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="hosts.json", daemon=True)
        self._thread.start()

    def update(self, view: LeaderView, now: float) -> None:
        """Have the state written if the last write was long ago. This never waits for the disk."""
        if now >= self._due:
            self._due = now + EVERY_SECONDS
            with self._changed:
                self._content = hosts_content(view, now, time.time())
                self._changed.notify()

    def close(self, view: LeaderView, now: float) -> None:
        """Have the last state written, and wait for it for a second at most."""
        self._due = now
        self.update(view, now)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(1.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._content is not None or self._closed)
                content, self._content = self._content, None
            if content is None:
                return
            with suppress(Exception):  # a full disk, or a folder that --fresh has renamed
                self._write(self._path, json.dumps(content) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step. Unlike `atomic_write`, this does not wait until the content is on the disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, "utf-8")
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
