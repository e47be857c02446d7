"""The entries of a run's record. Each is a frozen dataclass that becomes one JSON file.

Every account that may write to the bucket can damage or forge an entry. The annotations state the types and bounds that
`read_entry.py` requires of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from forerun.cloud.labels import run_label
from forerun.cloud.provider import Capacity
from forerun.errors import UserError

VERSION: Literal[1] = 1  # of the record's format
LEASE_SECONDS = 60.0
LONGEST_LEASE_SECONDS = 3 * LEASE_SECONDS  # a lease that ends later than this from now is forged
LONGEST_LIMIT_SECONDS = 10 * 366 * 24 * 3600
LARGEST_ATTEMPT, MOST_HOSTS = 9999, 4096
_MOST_DETAIL_CHARACTERS = 4000


def _shortened(text: str) -> str:
    return text[:_MOST_DETAIL_CHARACTERS]


def _run_name(name: str) -> str:
    try:
        run_label(name)
    except UserError as error:
        raise ValueError(error.what) from error
    return name


# The time in seconds since 1970, up to the year 2100.
Time = Annotated[float, Field(ge=0, le=4_102_444_800, allow_inf_nan=False)]
Usd = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]
AttemptNumber = Annotated[int, Field(ge=1, le=LARGEST_ATTEMPT)]
HostIndex = Annotated[int, Field(ge=0, lt=MOST_HOSTS)]
LimitSeconds = Annotated[int, Field(ge=0, le=LONGEST_LIMIT_SECONDS)]
# One line without control characters: a name, a word or an address.
Word = Annotated[str, Field(max_length=2000, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
RunName = Annotated[Name, AfterValidator(_run_name)]
JobText = Annotated[str, Field(max_length=1_000_000)]
# Messages of programs have any length. A long one is cut, since it must not make the entry unreadable.
Detail = Annotated[str, AfterValidator(_shortened)]
Digest = Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f]*$")]

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

    provider: Name
    slice: Name
    zone: Name
    capacity: Capacity
    hosts: Annotated[int, Field(ge=1, le=MOST_HOSTS)]
    usd_per_hour: Usd
    step_seconds: Seconds | None = None
    hours: Seconds | None = None
    program: Word = ""
    preemptions: Seconds | None = None


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
      version: of the format of the record.
    """

    name: RunName
    folder: Name
    job: JobText
    options: Annotated[tuple[Option, ...], Field(min_length=1, max_length=1000)]
    max_usd: Usd | None
    created_at: Time
    device: Word = "tpu"
    arguments: Annotated[tuple[JobText, ...], Field(max_length=10_000)] = ()
    versions: Mapping[Word, Word] = field(default_factory=dict)
    total_steps: Count | None = None
    export: bool = True
    keeper: bool = False
    image: Word | None = None
    disk_gib: Count | None = None
    network: Word | None = None
    subnetwork: Word | None = None
    service_account: Word | None = None
    reservation: Word | None = None
    internal_only: bool = False
    wait_seconds: LimitSeconds | None = None
    keeper_usd_per_hour: Usd = 0.0
    keeper_at: Time | None = None
    keeper_spent_usd: Usd = 0.0
    version: Literal[1] = VERSION


@dataclass(frozen=True)
class AttemptEntry:
    """A slice that a controller is about to create. `attempts/NNN.json`, created once, before the request is sent.

    Attributes:
      resource: the name of the slice in its zone.
      limit_seconds: how long it may be billed, by the remaining budget; None: no limit.
      spent_usd: what all earlier attempts cost.
    """

    number: AttemptNumber
    option: Option
    resource: Name
    created_at: Time
    limit_seconds: LimitSeconds | None
    spent_usd: Usd


@dataclass(frozen=True)
class ReadyEntry:
    """The time from which an attempt is billed. `attempts/NNN-ready.json`, created once by the first that sees it."""

    at: Time


@dataclass(frozen=True)
class EndEntry:
    """The end of an attempt, after its deletion was verified. `attempts/NNN-end.json`, created once.

    Attributes:
      at: when billing ended; equal to the start of billing if it never became ready.
      usd: what it cost.
      failure: why the cloud refused it (a value of `Failure`), or an empty string.
    """

    at: Time
    reason: Word
    usd: Usd
    detail: Detail = ""
    failure: Word = ""


@dataclass(frozen=True)
class HostEntry:
    """The last report of a host. `hosts/NNN-II.json`, replaced every few seconds."""

    attempt: AttemptNumber
    host: HostIndex
    at: Time
    phase: Word
    step: Count | None = None
    detail: Detail = ""
    exit_code: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    program: Word = ""
    save_seconds: Seconds | None = None


@dataclass(frozen=True)
class StopEntry:
    """The request to stop the run with a checkpoint. `stop.json`, created once; removed by the next `forerun run`."""

    at: Time
    reason: Detail


@dataclass(frozen=True)
class FinishEntry:
    """The end of training and export. `finished.json`, created once by host 0.

    Attributes:
      files: size and SHA-256 of each result file below the run's bucket folder.
    """

    at: Time
    attempt: AttemptNumber
    files: Mapping[Name, tuple[Count, Digest]]


@dataclass(frozen=True)
class LeaseEntry:
    """The controller that acts at present. `controller.json`, renewed by it; another one may act after `until`."""

    holder: Name
    until: Time

    def is_held(self, now: float) -> bool:
        """Return whether its controller may still act. A lease that ends too late was not written by a controller."""
        return now < self.until <= now + LONGEST_LEASE_SECONDS
