"""A cloud in memory: slices, hosts, a bucket and a clock, for tests of the controller.

Billing and the states are implemented here a second time, independently of `forerun.cloud.control`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.cloud.control.controller import Controller
from forerun.cloud.control.ledger import RunLedger
from forerun.cloud.provider import (
    CloudUnavailable,
    Failure,
    HostAddress,
    RequestRefused,
    Resource,
    SliceRequest,
    SliceState,
    SliceStatus,
)
from forerun.cloud.record.entries import (
    STARTING,
    STOPPED,
    TRAINING,
    AttemptEntry,
    CloudRun,
    FinishEntry,
    HostEntry,
    Option,
)
from forerun.cloud.record.read_entry import undamaged
from forerun.cloud.record.run_files import RunFiles
from forerun.errors import StorageError

START = 1_000_000.0


class Killed(BaseException):
    """The process of the controller was killed."""


class MemoryFolder:
    """A bucket folder in memory. `before` is called before each operation, to inject faults."""

    is_local, retries = False, 0

    def __init__(self, contents: dict[str, bytes], prefix: str = "", before: Callable[[], None] = lambda: None) -> None:
        self.contents, self.prefix, self.before = contents, prefix, before

    @property
    def address(self) -> str:
        return f"gs://bucket/{self.prefix}".rstrip("/")

    def inside(self, name: str) -> MemoryFolder:
        return MemoryFolder(self.contents, f"{self.prefix}{name}/", self.before)

    def require_writable(self) -> None:
        self.before()

    def files(self) -> set[str]:
        self.before()
        return {name.removeprefix(self.prefix) for name in self.contents if name.startswith(self.prefix)}

    def read_many(self, names: Sequence[str]) -> list[bytes | None]:
        self.before()
        return [self.contents.get(self.prefix + name) for name in names]

    def create(self, name: str, content: bytes) -> bool:
        self.before()
        if self.prefix + name in self.contents:
            return False
        self.contents[self.prefix + name] = content
        return True

    def replace(self, name: str, content: bytes) -> None:
        self.before()
        self.contents[self.prefix + name] = content

    def remove(self, name: str) -> None:
        self.before()
        self.contents.pop(self.prefix + name, None)


@dataclass
class SimulatedSlice:
    request: SliceRequest
    hosts: int
    state: SliceState = SliceState.WAITING
    ready_at: float | None = None
    ended_at: float | None = None  # of billing
    preempted: bool = False
    delivered: bool = False
    queued_at: float = 0.0
    failure: Failure | None = None
    silent: bool = False


@dataclass
class SimulatedCloud:
    """The state of the cloud. It survives all controllers.

    Attributes:
      usd_per_hour: by slice.
      queue_seconds: how long a request waits; None: refused.
      work_seconds: of training until the job is finished.
      tells_times: whether the API tells when billing began and ended.
      fault: is called with the name of each call of a controller before it is carried out, to let the call fail.
      clock_error: seconds that the cloud's clock is wrong by. `now` is the true time.
    """

    usd_per_hour: Mapping[str, float]
    queue_seconds: float | None = 20.0
    work_seconds: float = 600.0
    now: float = START
    tells_times: bool = True
    agent_deletes: bool = True
    save_seconds: float = 10.0
    contents: dict[str, bytes] = field(default_factory=dict)
    slices: dict[tuple[str, str], SimulatedSlice] = field(default_factory=dict)
    past: list[SimulatedSlice] = field(default_factory=list)
    created: list[tuple[str, str]] = field(default_factory=list)
    trained_seconds: float = 0.0
    refuse: dict[str, Failure] = field(default_factory=dict)  # by zone
    before: Callable[[], None] = lambda: None
    fault: Callable[[str], None] = lambda call: None
    clock_error: float = 0.0

    def files(self, *, faulty: bool = False) -> RunFiles:
        folder: Any = MemoryFolder(self.contents, "", self._before if faulty else lambda: None)
        return RunFiles(folder)

    def _before(self) -> None:
        self.before()
        self.fault("bucket")

    def advance(self, seconds: float) -> None:
        """Let time pass in steps of at most 5 s."""
        end = self.now + seconds
        while self.now < end:
            step = min(5.0, end - self.now)
            self.now += step
            for one in list(self.slices.values()):
                self._advance_slice(one, step)

    def _advance_slice(self, one: SimulatedSlice, seconds: float) -> None:
        if one.state is SliceState.WAITING and self.queue_seconds is not None:
            if self.now - one.queued_at >= self.queue_seconds:
                one.state, one.ready_at = SliceState.READY, self.now
        elif one.state is SliceState.READY and one.delivered and not one.silent:
            self._train(one, seconds)

    def _train(self, one: SimulatedSlice, seconds: float) -> None:
        try:
            self._train_and_report(one, seconds)
        except StorageError:  # the hosts train on, and nobody sees it
            self.trained_seconds += seconds

    def _train_and_report(self, one: SimulatedSlice, seconds: float) -> None:
        files = self.files()
        number = int(one.request.labels["forerun-attempt"])
        stopping = undamaged(files.stop()) is not None
        finished = self.trained_seconds >= self.work_seconds
        if not stopping and not finished:
            self.trained_seconds += seconds
        phase = STOPPED if stopping else TRAINING
        for host in range(one.hosts):
            step = int(self.trained_seconds)
            code = 75 if stopping else None
            files.report_host(HostEntry(number, host, self.now, phase, step, "", code, save_seconds=self.save_seconds))
        if finished:
            files.create_finished(FinishEntry(self.now, number, {}))
            if self.agent_deletes:
                self.end(one)

    def train(self, seconds: float, *controllers: Controller) -> None:
        """Let controllers act and time pass until the run has trained for this time."""
        while self.trained_seconds < seconds:
            for one in controllers:
                one.step()
            self.advance(5)

    def preempt(self, name: str | None = None) -> None:
        for one in self.slices.values():
            if one.state is SliceState.READY and name in (None, one.request.name):
                one.state, one.preempted, one.ended_at = SliceState.PREEMPTED, True, self.now

    def end(self, one: SimulatedSlice) -> None:
        """Delete a slice."""
        if one.ended_at is None:
            one.ended_at = self.now
        self.slices.pop((one.request.name, one.request.zone), None)
        self.past.append(one)

    def bill(self) -> float:
        """Return what everything has cost until now."""
        total = 0.0
        for one in [*self.slices.values(), *self.past]:
            if one.ready_at is not None:
                seconds = (self.now if one.ended_at is None else one.ended_at) - one.ready_at
                if not (one.preempted and seconds <= 60):
                    total += self.usd_per_hour[one.request.slice] * seconds / 3600
        return total


class SimulatedProvider:
    name = "tpu"

    def __init__(self, cloud: SimulatedCloud) -> None:
        self.cloud = cloud

    def now(self) -> float:
        self.cloud.fault("now")
        return self.cloud.now + self.cloud.clock_error

    def enforces_limit(self, request: SliceRequest) -> bool:
        return False

    def create(self, request: SliceRequest) -> None:
        self.cloud.before()
        self.cloud.fault("create")
        key = request.name, request.zone
        if (failure := self.cloud.refuse.get(request.zone)) is not None:
            raise RequestRefused(failure, failure.value)
        if key not in self.cloud.slices:
            size = request.slice.rsplit("-", 1)[1]
            hosts = max(1, int(size) // 4) if size.isdigit() else 1
            self.cloud.slices[key] = SimulatedSlice(request, hosts, queued_at=self.cloud.now)
            self.cloud.created.append(key)
        self.cloud.before()

    def status(self, name: str, zone: str) -> SliceStatus:
        self.cloud.before()
        self.cloud.fault("status")
        one = self.cloud.slices.get((name, zone))
        if one is None:
            return SliceStatus(SliceState.ABSENT)
        times = (one.ready_at, one.ended_at) if self.cloud.tells_times else (None, None)
        return SliceStatus(one.state, failure=one.failure, ready_at=times[0], ended_at=times[1])

    def delete(self, name: str, zone: str) -> float | None:
        self.cloud.before()
        self.cloud.fault("delete")
        one = self.cloud.slices.get((name, zone))
        if one is not None:
            self.cloud.end(one)
        else:
            one = next((past for past in self.cloud.past if past.request.name == name), None)
        self.cloud.before()
        return one.ended_at if one is not None and self.cloud.tells_times else None

    def list(self) -> Sequence[Resource]:
        self.cloud.before()
        self.cloud.fault("list")
        return [
            Resource(
                "tpu",
                "node",
                name,
                zone,
                SliceStatus(one.state),
                one.request.labels,
                one.request.metadata,
                one.request.slice,
            )
            for (name, zone), one in self.cloud.slices.items()
        ]

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        self.cloud.before()
        self.cloud.fault("addresses")
        one = self.cloud.slices.get((name, zone))
        if one is None:
            raise CloudUnavailable("gone")
        return [HostAddress(host, f"10.0.0.{host}", f"10.0.0.{host}") for host in range(one.hosts)]

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        return [["ssh-ed25519 AAAA"] for _ in self.addresses(name, zone)]

    def requests(self, request: SliceRequest) -> Sequence[Mapping[str, object]]:
        return []


class SimulatedDelivery:
    def __init__(self, cloud: SimulatedCloud) -> None:
        self.cloud = cloud
        self.count = 0
        self.ready_at: float | None = None  # of the last delivery

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        return ""

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        return {"startup-script": "#!/bin/sh\n"}

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None = None,
    ) -> None:
        self.cloud.before()
        one = self.cloud.slices.get((attempt.resource, attempt.option.zone))
        if one is None:
            raise CloudUnavailable("gone")
        self.count += 1
        self.ready_at = ready_at
        if not one.delivered:
            one.delivered = True
            for host in range(one.hosts):
                self.cloud.files().report_host(HostEntry(attempt.number, host, self.cloud.now, STARTING))


@dataclass
class RecordedDisplay:
    actions: list[object] = field(default_factory=list)
    standbys: int = 0
    troubles: list[str] = field(default_factory=list)

    def show(self, view: object, action: object) -> None:
        self.actions.append(action)

    def standby(self, view: object, lease: object) -> None:
        self.standbys += 1

    def trouble(self, message: str) -> None:
        self.troubles.append(message)


def option(zone: str = "us-east1-d", slice: str = "v6e-8", usd_per_hour: float = 10.0, hosts: int = 2) -> Option:
    return Option("tpu", slice, zone, "spot", hosts, usd_per_hour, 1.0, 1.0)


def cloud_run(*options: Option, max_usd: float | None = 40.0, wait_seconds: int | None = None) -> CloudRun:
    base = CloudRun("sim", "gs://bucket", "name: sim\n", options or (option(),), max_usd, START)
    return replace(base, wait_seconds=wait_seconds)


def controller(
    cloud: SimulatedCloud, holder: str = "laptop", since: float = 0.0, ledger: RunLedger | None = None
) -> Controller:
    """Return a new controller, as a process that was started now. It has agreed to what the record contains now."""
    run = cloud.files().run()
    assert isinstance(run, CloudRun)
    return Controller(
        run,
        cloud.files(faulty=True),
        {"tpu": SimulatedProvider(cloud)},
        SimulatedDelivery(cloud),
        RecordedDisplay(),
        holder,
        since,
        ledger,
        elapsed=lambda: cloud.now,
    )
