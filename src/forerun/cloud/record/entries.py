"""The entries of a run's record. Each is a frozen dataclass that becomes one JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forerun.cloud.provider import Capacity

T = TypeVar("T")

# Phases of a host, in their usual order.
INSTALLING, CHECKING, STARTING, TRAINING, EXPORTING, FINISHED = (
    "installing",
    "checking",
    "starting",
    "training",
    "exporting",
    "finished",
)
STOPPING, STOPPED, PREEMPTING, BROKEN = "stopping", "stopped", "preempting", "broken"
FAILED = "failed"  # the job itself fails (exit code 1, 2, 70 or 74): another slice would fail in the same way

# Why an attempt or a run ended.
ENDED_FINISHED, ENDED_PREEMPTED, ENDED_REFUSED, ENDED_BROKEN = "finished", "preempted", "refused", "broken"
ENDED_STOPPED, ENDED_BUDGET, ENDED_FAILED = "stopped", "budget", "failed"


@dataclass(frozen=True)
class Option:
    """One way to run the job: a slice in a zone. The plan has shown that the job fits it.

    Attributes:
      provider: the name of the provider: `tpu`, `compute` or `ssh`.
      step_seconds: the planned time of a step; None if it was not planned.
      hours: the planned time of the whole job; on spot, with the time that preemptions cost.
      program: the planned hash of the program (its lowered text), or an empty string.
      preemptions: the expected number on spot.
    """

    provider: str
    slice: str
    zone: str
    capacity: Capacity
    hosts: int
    usd_per_hour: float
    step_seconds: float | None = None
    hours: float | None = None
    program: str = ""
    preemptions: float | None = None


@dataclass(frozen=True)
class CloudRun:
    """What the user asked for. `run.json`, created once.

    Attributes:
      folder: the bucket folder of the run: `checkpoint.folder` of the job, and the name.
      job: the job file, as text. Secrets are never part of a job.
      options: where to run it, in the order of preference.
      max_usd: the cap on the cost of all attempts together; None: no cap (only for machines that are not rented).
      device: `tpu`, `gpu` or `cpu`; the hosts refuse to train on another one.
      arguments: overrides of the job, such as `optimizer.lr=8e-5`.
      versions: of forerun, Python, jax and libtpu that planned the job.
      keeper_usd_per_hour: the price of the keeper; 0: the run has none.
      keeper_at: when the keeper was started, and billed from then on.
      keeper_spent_usd: what earlier keepers cost, before the user resumed the run.
    """

    name: str
    folder: str
    job: str
    options: Sequence[Option]
    max_usd: float | None
    created_at: float
    device: str = "tpu"
    arguments: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    total_steps: int | None = None
    export: bool = True
    keeper: bool = False
    image: str | None = None
    disk_gib: int | None = None
    network: str | None = None
    subnetwork: str | None = None
    service_account: str | None = None
    reservation: str | None = None
    internal_only: bool = False
    wait_seconds: int | None = None
    keeper_usd_per_hour: float = 0.0
    keeper_at: float | None = None
    keeper_spent_usd: float = 0.0


@dataclass(frozen=True)
class AttemptEntry:
    """A slice that a controller is about to create. `attempts/NNN.json`, created once, before the request is sent.

    Attributes:
      resource: the name of the slice in its zone.
      limit_seconds: how long it may be billed, by the remaining budget; None: no limit.
      spent_usd: what all earlier attempts cost.
    """

    number: int
    option: Option
    resource: str
    created_at: float
    limit_seconds: int | None
    spent_usd: float


@dataclass(frozen=True)
class ReadyEntry:
    """The time from which an attempt is billed. `attempts/NNN-ready.json`, created once by the first that sees it."""

    at: float


@dataclass(frozen=True)
class EndEntry:
    """The end of an attempt, after its deletion was verified. `attempts/NNN-end.json`, created once.

    Attributes:
      at: when billing ended; equal to the start of billing if it never became ready.
      usd: what it cost.
      failure: why the cloud refused it (a value of `Failure`), or an empty string.
    """

    at: float
    reason: str
    usd: float
    detail: str = ""
    failure: str = ""


@dataclass(frozen=True)
class HostEntry:
    """The last report of a host. `hosts/NNN-II.json`, replaced every few seconds."""

    attempt: int
    host: int
    at: float
    phase: str
    step: int | None = None
    detail: str = ""
    exit_code: int | None = None
    program: str = ""
    save_seconds: float | None = None


@dataclass(frozen=True)
class StopEntry:
    """The request to stop the run with a checkpoint. `stop.json`, created once; removed by the next `forerun run`."""

    at: float
    reason: str


@dataclass(frozen=True)
class FinishEntry:
    """The end of training and export. `finished.json`, created once by host 0.

    Attributes:
      files: size and SHA-256 of each result file below the run's bucket folder.
    """

    at: float
    attempt: int
    files: Mapping[str, tuple[int, str]]


@dataclass(frozen=True)
class LeaseEntry:
    """The controller that acts at present. `controller.json`, renewed by it; another one may act after `until`."""

    holder: str
    until: float


def to_json(entry: Any) -> bytes:
    return json.dumps(dataclasses.asdict(entry), indent=1, sort_keys=True).encode() + b"\n"


def from_json(kind: type[T], content: bytes) -> T:
    """Return the entry in a file. Keys of newer versions are ignored. Raise ValueError if it is damaged."""
    try:
        values = json.loads(content)
        known = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
        values = {name: value for name, value in values.items() if name in known}
        if kind is CloudRun:
            values["options"] = tuple(Option(**option) for option in values["options"])
            values["arguments"] = tuple(values.get("arguments", ()))
        if kind is AttemptEntry:
            values["option"] = Option(**values["option"])
        if kind is FinishEntry:
            values["files"] = {name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
        return kind(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
