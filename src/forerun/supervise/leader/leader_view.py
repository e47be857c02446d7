"""The state of the leader (`LeaderView`), and the events that change it. Nothing here waits, sends or reads a clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from forerun.errors import StorageError, UserError
from forerun.exit_codes import ENDED
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    Ending,
    Exited,
    FromHost,
    Hello,
    HostBeat,
    HostStacks,
    HostUnits,
    Idle,
    StartFailure,
    StopNotice,
    WorkerExit,
    WorkerView,
)
from forerun.supervise.slice_policy import SlicePolicy
from forerun.units import Seconds

JAX_FRAME = re.compile(r"[/(]jax(lib)?/|/jax[/_]|/jaxlib[/_]")


@dataclass(frozen=True)
class Member:
    """One host, as the leader knows it. `now` is the time of the leader's monotonic clock."""

    index: int
    instance: str
    name: str
    pid: int
    heard: float  # when its last message arrived
    connected: bool = True
    step: int = 0  # the highest step that it reported
    view: WorkerView = field(default_factory=WorkerView)
    facts: Mapping[str, str] = field(default_factory=dict)
    exit: WorkerExit | None = None
    idle: bool = True  # it has no worker of the current attempt
    begun: int | None = None  # units, its answer to `AskUnits`
    frames: tuple[str, ...] = ()  # the stack of its main thread, innermost first
    stacks: str | None = None
    busy: float = 0.0  # the number of cores that it used recently

    def begin(self) -> Member:
        """Return the host at the start of an attempt, without the data of the last one."""
        return Member(self.index, self.instance, self.name, self.pid, self.heard, self.connected, idle=False)

    def hear(self, message: FromHost, attempt: int, now: float) -> Member:
        """Return the host after a message. A message about another attempt only shows that the host is alive."""
        known = replace(self, heard=now)
        if getattr(message, "attempt", None) != attempt:
            return known
        match message:
            case HostBeat(view=WorkerView() as view, facts=facts):
                return replace(known, view=view, facts=facts or {}, step=max(self.step, view.step))
            case Exited():
                return replace(
                    known,
                    exit=WorkerExit(message.code, message.ended, message.tail),
                    view=replace(self.view, alive=False),
                    step=max(self.step, message.step),
                )
            case Idle():
                return replace(known, idle=True)
            case HostUnits():
                return replace(known, begun=message.units)
            case HostStacks():
                return replace(known, frames=message.frames, stacks=message.text, busy=message.busy)
        return known

    def excuse(self, away_seconds: float, now: float) -> Member:
        """Return the host after the leader did not run for `away_seconds`, in which it could not read messages."""
        return replace(self, heard=min(now, self.heard + away_seconds))

    def silent_seconds(self, now: float) -> float:
        """Return the time since the last message."""
        return now - self.heard

    def is_lost(self, limits: Limits, now: float) -> bool:
        """Return whether the host is disconnected, or has been silent for longer than `limits.lost`."""
        return not self.connected or self.silent_seconds(now) > limits.lost

    def seen(self, now: float) -> WorkerView:
        """Return the last view of the worker. The time since then counts as time without progress."""
        return replace(self.view, silent_seconds=self.view.silent_seconds + self.silent_seconds(now))

    @property
    def is_in_jax(self) -> bool:
        """Whether the main thread is inside jax, as on hosts that wait for another host."""
        return bool(self.frames) and JAX_FRAME.search(self.frames[0]) is not None

    def spoken(self) -> str:
        """Return the name of the host for messages, such as "host 1 (worker-1)"."""
        return f"host {self.index} ({self.name})"


LAST_SECONDS = 0.5  # of a grace time are reserved, so that forerun exits with its own code before it is killed

# Phases of the leader, in the order of an attempt. `decide` defines the transitions.


@dataclass(frozen=True)
class Gathering:
    """The leader waits until every host is connected, or until it continues with fewer slices."""

    since: float
    limit_seconds: float
    reminded: float  # when the absent hosts were last reported to the user


@dataclass(frozen=True)
class Watching:
    """The workers of the attempt run, and the leader monitors them."""


@dataclass(frozen=True)
class Settling:
    """A worker failed. The leader waits for failures that follow from it, so that it can find the first cause."""

    until: float


@dataclass(frozen=True)
class CollectingStacks:
    """The job is stalled. The leader waits for the stacks of all workers."""

    until: float


@dataclass(frozen=True)
class MoreSlices:
    """The outcome of an attempt whose workers stopped so that the next one has more slices. It is not a failure."""

    step: int


@dataclass(frozen=True)
class EndingWorkers:
    """The leader waits until no worker of the attempt is left.

    `outcome` is the end of the job, or the reason for another attempt. It is empty if a worker failed and the cause is
    not known yet.
    """

    outcome: Ending | MoreSlices | str


@dataclass(frozen=True)
class Pausing:
    """The leader waits before the next attempt."""

    until: float


@dataclass(frozen=True)
class FinishedJob:
    """The job is over. No phase follows."""

    ending: Ending


Phase = Gathering | Watching | Settling | CollectingStacks | EndingWorkers | Pausing | FinishedJob


@dataclass(frozen=True)
class StopRequest:
    """A stop, and what the leader has done about it. It was announced to a host, or the leader itself needs it."""

    why: str
    deadline: float
    grace_seconds: float
    reported: bool = False  # the user was informed
    asked: bool = False  # the workers were asked for their units
    decided: bool = False  # the workers got the last unit

    def remaining_seconds(self, now: float) -> float:
        """Return the seconds that the workers still have."""
        return max(0.0, self.deadline - LAST_SECONDS - now)


@dataclass(frozen=True)
class LeaderView:
    """Everything that the leader's decisions depend on, besides the time."""

    hosts: Hosts
    limits: Limits
    stacks_folder: str
    phase: Phase
    tries: RestartPolicy
    attempt: int = 0  # the number of the newest attempt
    members: Mapping[int, Member] = field(default_factory=dict)
    stop: StopRequest | None = None
    mistake: UserError | None = None  # the reason why the job cannot run, if there is one
    start_error: StorageError | None = None  # the number of the attempt could not be stored, so it did not start
    refused_peers: Mapping[str, str] = field(default_factory=dict)  # reasons by address
    policy: SlicePolicy = SlicePolicy()
    taking_part: tuple[int, ...] = ()  # the hosts that have a worker in the newest attempt
    growth: StopRequest | None = None  # the stop after which the next attempt has more slices

    @classmethod
    def at_start(
        cls,
        hosts: Hosts,
        limits: Limits,
        attempt: int,
        stacks_folder: str,
        now: float,
        policy: SlicePolicy | None = None,
    ) -> LeaderView:
        """Return the view before the first host connects. `attempt` is the number of the last attempt of the run."""
        return cls(
            hosts,
            limits,
            stacks_folder,
            Gathering(now, limits.gather, now),
            RestartPolicy(limits),
            attempt,
            policy=policy or SlicePolicy(hosts.count),
        )

    def ordered_members(self) -> list[Member]:
        """Return the hosts of the newest attempt by index."""
        return [self.members[index] for index in self.taking_part if index in self.members]

    def started(self, number: int, hosts: tuple[int, ...]) -> LeaderView:
        """Return the view at the start of an attempt on these hosts, without the data of the last one."""
        members = {
            index: member.begin() if index in hosts else replace(member.begin(), idle=True)
            for index, member in self.members.items()
        }
        return replace(self, attempt=number, taking_part=hosts, members=members, growth=None, phase=Watching())

    def absent_hosts(self, now: float) -> list[int]:
        """Return the indices of the hosts that never connected or are lost."""
        members = self.members
        return [
            index
            for index in range(self.hosts.count)
            if index not in members or members[index].is_lost(self.limits, now)
        ]

    def reached_step(self) -> int:
        """Return the highest step that a host reported in the newest attempt."""
        return max((member.step for member in self.members.values()), default=0)


# Events. `update` applies them to the view.


@dataclass(frozen=True)
class HostJoined:
    """A host was admitted."""

    hello: Hello


@dataclass(frozen=True)
class HostDisconnected:
    """The connection of a host closed."""

    index: int


@dataclass(frozen=True)
class MessageReceived:
    """A host sent a message."""

    index: int
    message: FromHost


@dataclass(frozen=True)
class PeerRefused:
    """A connection was rejected: its peer does not belong to this run, or repeats the index of a host."""

    address: str
    why: str


@dataclass(frozen=True)
class MistakeFound:
    """The job cannot run, for example because the versions of a host differ."""

    error: UserError


@dataclass(frozen=True)
class StartFailed:
    """The attempt did not start, because the leader cannot write to its folder."""

    error: StorageError


@dataclass(frozen=True)
class LeaderSuspended:
    """The process of the leader did not run for `seconds`, for example after Ctrl-Z."""

    seconds: float


Event = HostJoined | HostDisconnected | MessageReceived | PeerRefused | MistakeFound | StartFailed | LeaderSuspended


def update(view: LeaderView, event: Event, now: float) -> LeaderView:
    """Return the view after an event at the time `now`."""
    members = view.members
    match event:
        case HostJoined(hello):
            # A host ends its worker when it loses the leader, so a host that connects again is idle.
            before = members.get(hello.index)
            joined = Member(hello.index, hello.instance, hello.name, hello.pid, now, step=before.step if before else 0)
            return replace(view, members={**members, hello.index: joined})
        case HostDisconnected(index):
            return replace(view, members={**members, index: replace(members[index], connected=False)})
        case MessageReceived(index, message):
            heard = members[index].hear(message, view.attempt, now)
            return _with_message(replace(view, members={**members, index: heard}), index, message, now)
        case PeerRefused(address, why):
            return replace(view, refused_peers={**view.refused_peers, address: why})
        case MistakeFound(error):
            return replace(view, mistake=view.mistake or error)  # the first one counts
        case StartFailed(storage_error):
            # `decide` has already counted this attempt. The next one gets the same number.
            return replace(view, start_error=storage_error, attempt=view.attempt - 1)
        case LeaderSuspended(seconds):
            excused = {index: member.excuse(seconds, now) for index, member in members.items()}
            return replace(view, members=excused)


def _with_message(view: LeaderView, index: int, message: FromHost, now: float) -> LeaderView:
    """Return the view after a message that concerns the job, and not only its host."""
    match message:
        case StopNotice(why, seconds):
            # The first announcement gives the reason, and the earliest deadline counts.
            stop = view.stop or StopRequest(why, now + seconds, seconds)
            return replace(view, stop=replace(stop, deadline=min(stop.deadline, now + seconds)))
        case StartFailure():
            what = f"host {index}: {message.what}"
            error = UserError(message.code, what, why=message.why, fix=message.fix)
            return replace(view, mistake=view.mistake or error)
    return view


@dataclass(frozen=True)
class RestartPolicy:
    """The attempts at a job so far. `fruitless` counts the last ones that did not get beyond step `best`.

    A failing disk or bucket (`storage`) may recover, so it has a limit in seconds instead of a number of attempts.
    `now` is the time of a monotonic clock.
    """

    limits: Limits
    best: int = 0
    fruitless: int = 0
    storage: bool = False
    incidents: tuple[str, ...] = ()  # why the last attempts failed
    since: float = 0.0  # when the best step was reached
    waited: float = 0.0  # seconds from `since` to the end of the last attempt

    def advance(self, reached: int, now: float) -> RestartPolicy:
        """Return the count after an attempt that reached a step and did not fail."""
        return replace(self, best=reached, fruitless=0, since=now, incidents=()) if reached > self.best else self

    def cut_short(self, why: str, reached: int, now: float, *, storage: bool = False) -> RestartPolicy:
        """Return the count after an attempt that failed at step `reached`."""
        tries = self.advance(reached, now)
        return replace(
            tries,
            fruitless=tries.fruitless + 1,
            storage=storage,
            waited=now - tries.since,
            incidents=(*tries.incidents, why)[-self.limits.restarts - 1 :],
        )

    def ending(self) -> Ending | None:
        """Return the end of the job if no other attempt follows, else None."""
        if self.fruitless <= self.limits.restarts or (self.storage and self.waited < self.limits.storage):
            return None
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.incidents, 1))
        last = "" if len(self.incidents) == self.fruitless else ", the last of them:"
        return Ending(ENDED, f"given up: {self.fruitless} attempts did not get beyond step {self.best}{last}\n{listed}")

    def delay_seconds(self) -> float:
        """Return the delay before the next attempt. It grows, because the cause may persist for a while."""
        return self.limits.restart_delay_seconds(self.fruitless + self.storage)

    def spoken(self) -> str:
        """Return the text that announces the next attempt."""
        delay = self.delay_seconds()
        later = f", in {Seconds(delay)}" if delay else ""
        if self.fruitless == 1:
            return f"restarting{later}"
        if self.storage:
            left = Seconds(max(0.0, self.limits.storage - self.waited))
            return f"restart {self.fruitless} without a new step{later}, for {left} at most"
        return f"restart {self.fruitless} of {self.limits.restarts} without a new step{later}"
