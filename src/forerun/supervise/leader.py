"""The leader: gathers the hosts, starts each life of the job on all of them at once, decides when and why it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import USER_MISTAKE, StorageError, UserError
from forerun.supervise import verdicts
from forerun.supervise.culprit import blame, stalled
from forerun.supervise.door import Door
from forerun.supervise.ending import Ending
from forerun.supervise.hosts import Hosts
from forerun.supervise.limits import STOPPED, Limits
from forerun.supervise.member import Member
from forerun.supervise.owner import Owner
from forerun.supervise.secret import Secret
from forerun.supervise.stop import save_fits
from forerun.supervise.tries import Tries
from forerun.supervise.tunnel import TunnelExit
from forerun.supervise.voice import Voice
from forerun.units import Seconds

LAST_SECONDS = 0.5  # of a grace time, to leave with a code of our own
REMINDER_SECONDS = 15.0
TURN_SECONDS = 0.02  # between two looks at everything, however many hosts speak


@dataclass
class Announced:
    """A stop under way."""

    why: str
    deadline: float
    asked: bool = False
    decided: bool = False

    def remaining_seconds(self) -> float:
        return max(0.0, self.deadline - LAST_SECONDS - time.monotonic())


class Leader:
    def __init__(
        self,
        hosts: Hosts,
        secret: Secret,
        identity: Mapping[str, str],
        owner: Owner,
        folder: Path,
        limits: Limits,
        voice: Voice,
    ) -> None:
        self._hosts, self._owner = hosts, owner
        self._limits, self._voice = limits, voice
        self._stop: Announced | None = None
        self._tries = Tries(limits)
        self._began = time.monotonic()
        self._tunnels = TunnelExit(folder)
        self.door = Door(hosts, secret, identity, limits, voice, self._hear, self._tunnels)

    async def run(self) -> Ending:
        """The whole job. Every host is told how it ended."""
        beats = asyncio.create_task(self._beat())
        try:
            ending = await self._lives()
        except UserError as error:
            ending = Ending.mistake(error)
        finally:
            beats.cancel()
        self._note("over", code=ending.code, text=ending.text or ending.what)
        await self.door.close(ending)
        return ending

    async def _lives(self) -> Ending:
        limit = self._limits.gather
        while True:
            await self._gather(limit)
            if self._stop is not None:
                return Ending(STOPPED, f"stopped as asked ({self._stop.why}), between two attempts")
            try:
                found = await self._live()
                storage = verdicts.is_storage(verdicts.first_cause(self._members()))
            except StorageError as error:  # of the supervisor's own folder
                if not self._tries.best:
                    raise
                found, storage = f"{error.what}: {error.why}", True
            if isinstance(found, Ending):
                return found
            if self._stop is not None:
                return Ending(STOPPED, f"stopped as asked ({self._stop.why}); on the way {found}")
            self._tries.cut_short(found, self._reached(), time.monotonic(), storage=storage)
            if ending := self._tries.ending():
                return ending
            self._voice.say(f"{found}\n  {self._tries.spoken()}")
            await self._pause(self._tries.delay_seconds())
            limit = self._limits.reconnect

    def _reached(self) -> int:
        return max((member.step for member in self._members()), default=0)

    # Before an attempt

    async def _gather(self, limit_seconds: float) -> None:
        """Until every host is here. Names those who are not, now and then and at the end."""
        began = told = time.monotonic()
        while absent := self._absent():
            waited = time.monotonic() - began
            if self._stop is not None:
                return
            if waited > limit_seconds:
                here = [member for member in self._members() if member.index not in absent]
                strangers = self.door.strangers()
                raise verdicts.missing(absent, here, limit_seconds, self._hosts.address, strangers)
            if time.monotonic() - told > REMINDER_SECONDS:
                told = time.monotonic()
                self._voice.say(f"waiting for host {', '.join(map(str, absent))} ({Seconds(waited)})")
            await self._tick()

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._stop is None:
            await self._tick()

    def _absent(self) -> list[int]:
        here = self.door.members
        return [index for index in range(self._hosts.count) if index not in here or self._lost(here[index])]

    def _lost(self, member: Member) -> bool:
        return member.line is None or member.silent_seconds() > self._limits.lost

    # An attempt

    async def _live(self) -> Ending | str:
        """One life of the job: how it ended, or what cut it short."""
        attempt = self._owner.next_attempt()
        self._note("start", attempt=attempt)
        self._tunnels.begin(attempt)
        try:
            for member in self._members():
                member.begin()
                member.send({"kind": "start", "attempt": attempt})
            found = await self._watched()
            if isinstance(found, str) and found:
                self._note("fault", attempt=attempt, text=found)
            await self._end_all(attempt)
        finally:
            self._tunnels.end()
        if found == "":  # a death: only now is it known who else died, and who was ended by us
            found = self._cause()
            self._note("cause", attempt=attempt, text=found if isinstance(found, str) else found.text)
        return found

    async def _watched(self) -> Ending | str:
        while True:
            await self._tick()
            members = self._members()
            if all(map(verdicts.fine, members)):
                return self._finished(members)
            if lost := self._lost_hosts():
                return lost
            if back := [member for member in members if member.idle]:  # it has ended its worker meanwhile
                return f"lost the line to {', '.join(member.spoken() for member in back)} for a moment"
            if any(map(verdicts.died, members)):
                self._note("death", attempt=self._owner.attempt)
                await asyncio.sleep(self._limits.settle)
                return self._lost_hosts()  # of a host that died, the end of its worker may be felt before its own
            if differs := verdicts.differing(self.door.members):
                raise differs
            if self._stop is not None and self._agree(self._stop, members):
                return Ending(STOPPED, f"{self._stop.why}: the grace time ended before all hosts had stopped")
            if stalled({member.index: member.seen() for member in members}):
                return await self._stuck(members)

    def _lost_hosts(self) -> str:
        """Who is gone, in words; nothing if all are here."""
        lost = [member for member in self._members() if self._lost(member)]
        if not lost:
            return ""
        names = ", ".join(member.spoken() for member in lost)
        return f"lost {names}: no word for {Seconds(max(member.silent_seconds() for member in lost))}"

    def _finished(self, members: list[Member]) -> Ending:
        if any(member.exit is not None and member.exit.code == STOPPED for member in members):
            step = max(member.step for member in members)
            return Ending(STOPPED, f"stopped as asked ({self._stop.why if self._stop else 'by itself'}) at step {step}")
        return Ending(0)

    def _cause(self) -> Ending | str:
        cause = verdicts.first_cause(self._members())
        if cause is None or cause.exit is None:
            return "a worker died"
        # A disk that fails before the first step is not waited for: somebody is there, who has just started the job.
        begun = max(self._tries.best, self._reached()) > 0
        if cause.exit.code == USER_MISTAKE or (verdicts.is_storage(cause) and not begun):
            text = f"{cause.spoken()} ended the job:\n{cause.exit.tail.strip()}"
            return Ending(cause.exit.code, text, host=cause.index)
        return verdicts.death(cause)

    async def _stuck(self, members: list[Member]) -> str:
        """Takes everybody's stacks, keeps them, and names the culprit."""
        self._note("stall", attempt=self._owner.attempt)
        for member in members:
            member.send({"kind": "stacks"})
        deadline = time.monotonic() + self._limits.stacks
        while time.monotonic() < deadline and any(member.stacks is None for member in members):
            await self._tick()
        verdict = blame({member.index: member.evidence() for member in members})
        self._note("culprit", attempt=self._owner.attempt, host=verdict.host)
        shown = [member for member in members if member.stacks]
        places = {self._owner.keep_stacks(self._owner.attempt, member.index, member.stacks or "") for member in shown}
        return "\n  ".join([verdict.why, *(f"stacks of all threads: {place}" for place in places)])

    def _agree(self, stop: Announced, members: list[Member]) -> bool:
        """Carries an announced stop on by one turn; True when its time is over."""
        alive = [member for member in members if member.exit is None]
        if not stop.asked:
            stop.asked = True
            for member in alive:
                member.send({"kind": "ask", "seconds": stop.remaining_seconds()})
        if not stop.decided and all(member.begun is not None for member in alive):
            stop.decided = True
            remaining = stop.remaining_seconds()
            seconds = [member.view.save_seconds for member in alive if member.view.save_seconds is not None]
            step_seconds = max((member.view.step_seconds for member in alive), default=0.0)
            save = save_fits(max(seconds, default=None), remaining, step_seconds)
            last = max((member.begun or 0 for member in alive), default=0)
            for member in alive:
                member.send({"kind": "decide", "units": last, "save": save, "seconds": remaining})
            self._note("agreed", units=last, save=save, remaining_seconds=remaining)
        return stop.remaining_seconds() == 0

    async def _end_all(self, attempt: int) -> None:
        """Every worker that can be reached is gone before the next attempt; a lost host ends its own."""
        for member in self._members():
            member.send({"kind": "end", "attempt": attempt})
        while any(not member.idle and not self._lost(member) for member in self._members()):
            await self._tick()

    # What is heard

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        member.hear(message, self._owner.attempt)
        if message["kind"] == "asked":
            self._announced(str(message["why"]), float(message["seconds"]))
        elif message["kind"] == "mistake":
            what = f"host {member.index}: {message['what']}"
            self.door.mistake = UserError(what, why=str(message["why"]), fix=str(message["fix"]))

    def _announced(self, why: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if self._stop is None:
            self._stop = Announced(why, deadline)
            self._note("stop", why=why, grace_seconds=seconds)
            self._voice.say(f"stopping: {why}, {Seconds(seconds)} of grace")
        else:
            self._stop.deadline = min(self._stop.deadline, deadline)

    def _members(self) -> list[Member]:
        return [self.door.members[index] for index in sorted(self.door.members)]

    async def _tick(self) -> None:
        """Until something was heard, or a little later. Raises a mistake that came in at the door."""
        began = time.monotonic()
        await self.door.changed(self._limits.beat)
        await asyncio.sleep(TURN_SECONDS)
        away = time.monotonic() - began - self._limits.beat - TURN_SECONDS
        if away > self._limits.beat:
            for member in self._members():
                member.excuse(away)
        if self.door.mistake is not None:
            raise self.door.mistake

    async def _beat(self) -> None:
        while True:
            for member in self._members():
                member.send({"kind": "beat"})
            await asyncio.sleep(self._limits.beat)

    def _note(self, kind: str, **about: Any) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        self._owner.write_down({"kind": kind, "seconds": seconds, "unix_seconds": round(time.time(), 3), **about})
