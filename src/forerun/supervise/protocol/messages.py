"""Messages of the supervisor protocol, one dataclass per message. `json_form` has their JSON form.

Three kinds of processes take part: the leader, the supervisor of each host, and the worker of each host.

    worker  -- FromWorker -->      supervisor  -- FromHost -->   leader
    worker  <-- FromSupervisor --  supervisor  <-- FromLeader -- leader
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from forerun.supervise.protocol.ending import Ending
from forerun.supervise.protocol.worker_state import WorkerView


class Message(Protocol):
    """Any message. `kind` names its class in JSON."""

    kind: ClassVar[str]


# From the supervisor of a host to the leader


@dataclass(frozen=True)
class Hello:
    """Introduces a host. It is the first message of a connection."""

    kind: ClassVar[str] = "hello"
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

    kind: ClassVar[str] = "tunnel"
    attempt: int


@dataclass(frozen=True)
class HostBeat:
    """Shows that the host is alive and how far its worker is. All fields are None for a host without a worker."""

    kind: ClassVar[str] = "beat"
    attempt: int | None = None
    view: WorkerView | None = None
    facts: Mapping[str, str] | None = None  # must be equal on all hosts


@dataclass(frozen=True)
class StopNotice:
    """Reports that this host will be stopped in `seconds`."""

    kind: ClassVar[str] = "asked"
    why: str
    seconds: float


@dataclass(frozen=True)
class StartFailure:
    """Reports a UserError that prevents this host from starting its worker."""

    kind: ClassVar[str] = "mistake"
    code: str
    what: str
    why: str
    fix: str
    attempt: int


@dataclass(frozen=True)
class Exited:
    """Reports the exit of the worker. See `WorkerExit` for the fields."""

    kind: ClassVar[str] = "exited"
    code: int
    ended: bool
    tail: str
    step: int
    attempt: int


@dataclass(frozen=True)
class Idle:
    """Confirms `EndWorker`: no worker of the attempt is left on this host."""

    kind: ClassVar[str] = "idle"
    attempt: int


@dataclass(frozen=True)
class HostUnits:
    """Answers `AskUnits`: `units` have begun, and the worker of this host begins no other one before `StopAfter`."""

    kind: ClassVar[str] = "begun"
    units: int
    attempt: int


@dataclass(frozen=True)
class HostStacks:
    """Answers `AskStacks`. `frames` belong to the main thread, innermost first. `busy` is in cores."""

    kind: ClassVar[str] = "stacks"
    text: str
    frames: tuple[str, ...]
    busy: float
    attempt: int


# From the leader to the supervisor of a host; `Ending` ends the connection


@dataclass(frozen=True)
class LeaderBeat:
    """Shows that the leader is alive."""

    kind: ClassVar[str] = "beat"


@dataclass(frozen=True)
class StartWorker:
    """Starts the worker of an attempt. `index` is its number among the `hosts` that have a worker.

    `slices` is the number of slices that these hosts form, or None if the run does not count slices.
    """

    kind: ClassVar[str] = "start"
    attempt: int
    index: int
    hosts: int
    slices: int | None = None


@dataclass(frozen=True)
class EndWorker:
    """Ends the worker of an attempt. `Idle` confirms it."""

    kind: ClassVar[str] = "end"
    attempt: int


@dataclass(frozen=True)
class AskStacks:
    """Asks for the stacks of the worker. `HostStacks` answers it."""

    kind: ClassVar[str] = "stacks"


@dataclass(frozen=True)
class AskUnits:
    """Asks the worker how many units it has begun. A stop follows within `seconds`. Supervisors forward it.

    `ends_job` is false if another attempt follows the stop.
    """

    kind: ClassVar[str] = "ask"
    seconds: float
    ends_job: bool = True


@dataclass(frozen=True)
class StopAfter:
    """Stops the worker after `units` units, within `seconds`. `save` permits a last save. Supervisors forward it.

    `ends_job` is false if another attempt follows the stop.
    """

    kind: ClassVar[str] = "decide"
    units: int
    save: bool
    seconds: float
    ends_job: bool = True


# From a supervisor to its worker, besides `AskUnits` and `StopAfter`


@dataclass(frozen=True)
class Welcome:
    """Answers `WorkerHello`. A stop that was announced earlier arrives before it."""

    kind: ClassVar[str] = "welcome"


@dataclass(frozen=True)
class Begin:
    """Assigns an attempt to a worker: a new one, or a spare. `variables` extend its environment."""

    kind: ClassVar[str] = "begin"
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

    kind: ClassVar[str] = "hello"
    thread: int  # identifier of the main thread
    pid: int


@dataclass(frozen=True)
class Phase:
    """Reports the start of a phase."""

    kind: ClassVar[str] = "phase"
    name: str
    units: int


@dataclass(frozen=True)
class Step:
    """Reports a completed step."""

    kind: ClassVar[str] = "step"
    step: int
    units: int


@dataclass(frozen=True)
class Saved:
    """Reports the time of a save, from its start to its commit."""

    kind: ClassVar[str] = "saved"
    seconds: float
    units: int


@dataclass(frozen=True)
class DeviceBytes:
    """Reports the memory in use on the device that has the most, and the limit of the device."""

    kind: ClassVar[str] = "memory"
    bytes: int
    limit: int  # 0 if it is unknown


@dataclass(frozen=True)
class Waiting:
    """Reports that the worker starts to wait for something local, such as data."""

    kind: ClassVar[str] = "waiting"
    what: str
    units: int


@dataclass(frozen=True)
class Unit:
    """Reports the start of a unit."""

    kind: ClassVar[str] = "unit"
    units: int


@dataclass(frozen=True)
class Fact:
    """Reports a value that must be equal on all hosts."""

    kind: ClassVar[str] = "fact"
    name: str
    value: str


@dataclass(frozen=True)
class WorkerUnits:
    """Answers `AskUnits`: the number of units that the worker has begun."""

    kind: ClassVar[str] = "begun"
    units: int


@dataclass(frozen=True)
class Sigterm:
    """Reports that the worker received SIGTERM."""

    kind: ClassVar[str] = "sigterm"


FromHost = HostBeat | StopNotice | StartFailure | Exited | Idle | HostUnits | HostStacks
FromLeader = LeaderBeat | StartWorker | EndWorker | AskStacks | AskUnits | StopAfter | Ending
FromSupervisor = Welcome | Begin | AskUnits | StopAfter
FromWorker = WorkerHello | Phase | Step | Saved | DeviceBytes | Waiting | Unit | Fact | WorkerUnits | Sigterm
