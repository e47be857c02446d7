"""Messages of the supervisor protocol, one dataclass per message. `json_form` has their JSON form.

Three kinds of processes take part: the leader, the supervisor of each host, and the worker of each host.

    worker  -- FromWorker -->      supervisor  -- FromHost -->   leader
    worker  <-- FromSupervisor --  supervisor  <-- FromLeader -- leader
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from forerun.errors import StorageError, UserError
from forerun.exit_codes import STORAGE_FAILED

STEP = "step"
OUT_OF_MEMORY = "the kernel killed it: out of memory"  # in the tail of such a worker


@dataclass(frozen=True)
class WorkerView:
    """The progress of one worker at one moment.

    `units` counts the units of common work, such as steps, that the worker has begun. All hosts count the same units.
    """

    phase: str = "start"
    step: int = 0
    units: int = 0
    silent_seconds: float = 0.0  # since the last report of progress
    limit_seconds: float = math.inf  # of `silent_seconds`, in this phase
    state: str = "?"  # the letter of the process state in /proc: R, S, D, T ...
    cpu_seconds: float = 0.0
    save_seconds: float | None = None  # of the last committed save
    step_seconds: float = 0.0  # the 99th percentile
    alive: bool = True
    halted: bool = False  # a signal stopped the process for longer than a stall may last
    memory: str = "RAM"  # what `memory_bytes` counts: `RAM` of the process, or `HBM` of its fullest device
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None

    @property
    def overdue(self) -> bool:
        """Whether the worker has exceeded its limit without progress."""
        return self.alive and (self.halted or self.silent_seconds > self.limit_seconds)

    @property
    def stepping(self) -> bool:
        """Whether the worker makes steps, rather than being in another phase."""
        return self.phase == STEP


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker. `code` is negative if a signal ended it. `ended` is true if its supervisor killed it."""

    code: int
    ended: bool
    tail: str  # the end of its stderr

    def spoken(self) -> str:
        """Return a phrase that describes the exit, such as "was killed by SIGKILL"."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"was killed by signal {-self.code}"


@dataclass(frozen=True)
class Ending:
    """The end of a job: the exit code of all hosts, and a text for the user.

    `error`, `what`, `why` and `fix` are the parts of a UserError. They are empty if the user cannot correct the cause.
    """

    code: int
    text: str = ""
    error: str = ""  # the error code, such as E-HOSTS-001
    what: str = ""
    why: str = ""
    fix: str = ""
    host: int = -1  # the host whose worker has already printed the cause

    @classmethod
    def mistake(cls, error: UserError) -> Self:
        """Return the end of a job that cannot run because of `error`."""
        return cls(error.exit_code, "", error.code, error.what, error.why, error.fix)

    def exit_code(self) -> int:
        """Return the exit code. Raise UserError or StorageError if the user can correct the cause."""
        if self.what:
            kind = StorageError if self.code == STORAGE_FAILED else UserError
            raise kind(self.error, self.what, why=self.why, fix=self.fix)
        return self.code


# From the supervisor of a host to the leader


@dataclass(frozen=True)
class Hello:
    """Introduces a host. It is the first message of a connection."""

    index: int
    count: int
    instance: str  # differs between two processes with the same index
    name: str
    pid: int
    identity: Mapping[str, str]  # must be equal on all hosts

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError("index")


@dataclass(frozen=True)
class OpenTunnel:
    """Turns a connection into a tunnel to the coordinator of an attempt. It is the first message of a connection."""

    attempt: int


@dataclass(frozen=True)
class HostBeat:
    """Shows that the host is alive and how far its worker is. All fields are None for a host without a worker."""

    attempt: int | None = None
    view: WorkerView | None = None
    facts: Mapping[str, str] | None = None  # must be equal on all hosts


@dataclass(frozen=True)
class StopNotice:
    """Reports that this host will be stopped in `seconds`."""

    why: str
    seconds: float


@dataclass(frozen=True)
class StartFailure:
    """Reports a UserError that prevents this host from starting its worker."""

    code: str
    what: str
    why: str
    fix: str
    attempt: int


@dataclass(frozen=True)
class Exited:
    """Reports the exit of the worker. See `WorkerExit` for the fields."""

    code: int
    ended: bool
    tail: str
    step: int
    attempt: int


@dataclass(frozen=True)
class Idle:
    """Confirms `EndWorker`: no worker of the attempt is left on this host."""

    attempt: int


@dataclass(frozen=True)
class HostUnits:
    """Answers `AskUnits`: `units` have begun, and the worker of this host begins no other one before `StopAfter`."""

    units: int
    attempt: int


@dataclass(frozen=True)
class HostStacks:
    """Answers `AskStacks`. `frames` belong to the main thread, innermost first. `busy` is in cores."""

    text: str
    frames: tuple[str, ...]
    busy: float
    attempt: int


# From the leader to the supervisor of a host; `Ending` ends the connection


@dataclass(frozen=True)
class LeaderBeat:
    """Shows that the leader is alive."""


@dataclass(frozen=True)
class StartWorker:
    """Starts the worker of an attempt. `index` is its number among the `hosts` that have a worker.

    `slices` is the number of slices that these hosts form, or None if the run does not count slices.
    """

    attempt: int
    index: int
    hosts: int
    slices: int | None = None


@dataclass(frozen=True)
class EndWorker:
    """Ends the worker of an attempt. `Idle` confirms it."""

    attempt: int


@dataclass(frozen=True)
class AskStacks:
    """Asks for the stacks of the worker. `HostStacks` answers it."""


@dataclass(frozen=True)
class AskUnits:
    """Asks the worker how many units it has begun. A stop follows within `seconds`. Supervisors forward it.

    `ends_job` is false if another attempt follows the stop.
    """

    seconds: float
    ends_job: bool = True


@dataclass(frozen=True)
class StopAfter:
    """Stops the worker after `units` units, within `seconds`. `save` permits a last save. Supervisors forward it.

    `ends_job` is false if another attempt follows the stop.
    """

    units: int
    save: bool
    seconds: float
    ends_job: bool = True


# From a supervisor to its worker, besides `AskUnits` and `StopAfter`


@dataclass(frozen=True)
class Welcome:
    """Answers `WorkerHello`. A stop that was announced earlier arrives before it."""


@dataclass(frozen=True)
class Begin:
    """Assigns an attempt to a worker: a new one, or a spare. `variables` extend its environment."""

    attempt: int
    index: int
    hosts: int
    coordinator: str
    slices: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


# From a worker to its supervisor. All messages with `units` except `WorkerUnits` report progress.


@dataclass(frozen=True)
class WorkerHello:
    """Introduces a worker. It is the first message of a worker."""

    thread: int  # identifier of the main thread
    pid: int


@dataclass(frozen=True)
class Phase:
    """Reports the start of a phase."""

    name: str
    units: int


@dataclass(frozen=True)
class Step:
    """Reports a completed step."""

    step: int
    units: int


@dataclass(frozen=True)
class Saved:
    """Reports the time of a save, from its start to its commit."""

    seconds: float
    units: int


@dataclass(frozen=True)
class DeviceBytes:
    """Reports the memory in use on the device that has the most, and the limit of the device."""

    bytes: int
    limit: int  # 0 if it is unknown


@dataclass(frozen=True)
class Waiting:
    """Reports that the worker starts to wait for something local, such as data."""

    what: str
    units: int


@dataclass(frozen=True)
class Unit:
    """Reports the start of a unit."""

    units: int


@dataclass(frozen=True)
class Fact:
    """Reports a value that must be equal on all hosts."""

    name: str
    value: str


@dataclass(frozen=True)
class WorkerUnits:
    """Answers `AskUnits`: the number of units that the worker has begun."""

    units: int


@dataclass(frozen=True)
class Sigterm:
    """Reports that the worker received SIGTERM."""


FromHost = HostBeat | StopNotice | StartFailure | Exited | Idle | HostUnits | HostStacks
FromLeader = LeaderBeat | StartWorker | EndWorker | AskStacks | AskUnits | StopAfter | Ending
FromSupervisor = Welcome | Begin | AskUnits | StopAfter
FromWorker = WorkerHello | Phase | Step | Saved | DeviceBytes | Waiting | Unit | Fact | WorkerUnits | Sigterm
Message = Hello | OpenTunnel | FromHost | FromLeader | FromSupervisor | FromWorker
