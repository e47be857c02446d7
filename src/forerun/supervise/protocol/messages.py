"""Messages of the supervisor protocol, one dataclass per message, and their JSON form.

Three kinds of processes take part: the leader, the supervisor of each host, and the worker of each host.

    worker  -- FromWorker -->      supervisor  -- FromHost -->   leader
    worker  <-- FromSupervisor --  supervisor  <-- FromLeader -- leader

A message is one JSON object. Its field `kind` names the class. The other fields are those of the class. All processes
of a run have the same version (the leader compares the versions before it admits a host). Decoding therefore accepts
exactly what `encode` writes: it rejects a message with a missing, unknown or wrong field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Protocol, get_args, get_origin, get_type_hints

from forerun.supervise.protocol.ending import Ending
from forerun.supervise.protocol.worker_state import WorkerView


class InvalidMessage(Exception):
    """A message that cannot be decoded. Its sender is not a forerun process of this version."""


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


def encode(message: Message) -> dict[str, Any]:
    """Return the JSON object of a message. Fields that are None are omitted."""
    values = asdict(message)  # type: ignore[call-overload]
    return {"kind": message.kind, **{name: value for name, value in values.items() if value is not None}}


def decode_first(message: Mapping[str, Any]) -> Hello | OpenTunnel:
    """Return the first message of a connection to the leader, or raise InvalidMessage."""
    return _decode(message, (Hello, OpenTunnel))


def decode_from_host(message: Mapping[str, Any]) -> FromHost:
    """Return a message from a host, or raise InvalidMessage."""
    return _decode(message, get_args(FromHost))


def decode_from_leader(message: Mapping[str, Any]) -> FromLeader:
    """Return a message from the leader, or raise InvalidMessage."""
    return _decode(message, get_args(FromLeader))


def decode_from_supervisor(message: Mapping[str, Any]) -> FromSupervisor:
    """Return a message from a supervisor to its worker, or raise InvalidMessage."""
    return _decode(message, get_args(FromSupervisor))


def decode_from_worker(message: Mapping[str, Any]) -> FromWorker:
    """Return a message from a worker, or raise InvalidMessage."""
    return _decode(message, get_args(FromWorker))


def _decode(message: Mapping[str, Any], classes: tuple[Any, ...]) -> Any:
    kind = message.get("kind")
    for known in classes:
        if known.kind == kind:
            return _construct(known, {name: value for name, value in message.items() if name != "kind"})
    raise InvalidMessage("a message of an unknown kind")


def _construct(cls: Any, values: Mapping[str, Any]) -> Any:
    hints = _hints(cls)
    if unknown := values.keys() - hints.keys():
        raise InvalidMessage(f"a message '{_name(cls)}' with an unknown field '{min(unknown)}'")
    given = {}
    for name, (hint, required) in hints.items():
        if name not in values and required:
            raise InvalidMessage(f"a message '{_name(cls)}' without '{name}'")
        if name in values:
            try:
                given[name] = _value(values[name], hint)
            except (TypeError, OverflowError) as error:
                raise InvalidMessage(f"a message '{_name(cls)}' with no valid '{name}'") from error
    try:
        return cls(**given)
    except ValueError as error:
        raise InvalidMessage(f"a message '{_name(cls)}' with no valid '{error}'") from error


@cache
def _hints(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field and whether it is required. Fields that can be None are optional."""
    types = get_type_hints(cls)
    return {each.name: (types[each.name], NoneType not in get_args(types[each.name])) for each in fields(cls)}


def _value(value: Any, hint: Any) -> Any:
    """Return `value` if it has the type `hint`, else raise TypeError.

    JSON objects become dataclasses and lists become tuples. Of the other types, only an int is converted: to a float.
    """
    if is_dataclass(hint) and isinstance(value, dict):
        return _construct(hint, value)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _value(value, next(part for part in parts if part is not NoneType))
    if origin is tuple and isinstance(value, list):
        return tuple(_value(each, parts[0]) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _value(each, parts[1]) for name, each in value.items()}
    if hint is float and type(value) in (int, float) and not math.isnan(value):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise TypeError


def _name(cls: Any) -> str:
    return str(getattr(cls, "kind", cls.__name__))
