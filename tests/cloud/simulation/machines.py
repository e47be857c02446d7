"""The simulated cloud: machines with their true times, and a provider that shows them to forerun."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.cloud import labels
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
from simulation.events import World
from simulation.process import Process

HOSTS = {"v6e-4": 1, "v6e-8": 2, "e2-small": 1}


@dataclass
class Machine:
    """A slice or a keeper, from its request to its deletion. All times are true times.

    Attributes:
      usd_per_hour: the true price.
      gone_at: when billing ended.
      is_listed: the resource exists in the API, also after a preemption.
      delivered_at: when the job arrived, if it did.
      seen_at, last_seen_at: when a controller saw for the first and the last time that it runs.
    """

    request: SliceRequest
    provider: str
    usd_per_hour: float
    requested_at: float
    state: SliceState = SliceState.WAITING
    ready_at: float | None = None
    gone_at: float | None = None
    is_preempted: bool = False
    is_listed: bool = True
    delivered_at: float | None = None
    seen_at: float | None = None
    last_seen_at: float | None = None
    guest: object = None

    @property
    def key(self) -> tuple[str, str]:
        return self.request.name, self.request.zone

    @property
    def is_keeper(self) -> bool:
        return self.request.labels.get(labels.ROLE) == labels.KEEPER_ROLE

    @property
    def attempt(self) -> int:
        return int(self.request.labels.get(labels.ATTEMPT, "0"))

    @property
    def hosts(self) -> int:
        return HOSTS[self.request.slice]

    @property
    def runs(self) -> bool:
        return self.state is SliceState.READY

    def see(self, process: Process) -> None:
        """Note that a process has asked for the state."""
        if self.runs and process.role != "host":
            self.last_seen_at = process.world.now
            self.seen_at = self.last_seen_at if self.seen_at is None else self.seen_at


@dataclass
class Cloud:
    """All machines, past and present.

    Attributes:
      prices: the true price of each slice and zone.
      queue_seconds: how long each request waits, by zone; None: refused.
      has_limit: the API deletes machines at the limit of their request.
      tells_times: the API tells when billing began and ended.
      on_ready, on_gone: called when a machine starts and ends.
      clock_glitches: (start, end, offset) of wrong times in the answers.
    """

    world: World
    prices: Mapping[tuple[str, str], float]
    queue_seconds: dict[str, float | None]
    has_limit: bool = False
    tells_times: bool = True
    clock_glitches: list[tuple[float, float, float]] = field(default_factory=list)
    on_ready: Callable[[Machine], None] = lambda machine: None
    on_gone: Callable[[Machine], None] = lambda machine: None
    machines: list[Machine] = field(default_factory=list)

    def find(self, name: str, zone: str) -> Machine | None:
        """Return the resource that the API has, or None."""
        for machine in reversed(self.machines):
            if machine.is_listed and machine.key == (name, zone):
                return machine
        return None

    def past(self, name: str, zone: str) -> Machine | None:
        """Return the newest resource of this name that was deleted, or None."""
        deleted = (machine for machine in reversed(self.machines) if not machine.is_listed)
        return next((machine for machine in deleted if machine.key == (name, zone)), None)

    def time(self) -> float:
        """Return the time of the API's answers."""
        now = self.world.now
        for start, end, offset in self.clock_glitches:
            if start <= now < end:
                self.world.fault("wrong times of the API")
                return now + offset
        return now

    def create(self, request: SliceRequest, provider: str) -> None:
        if self.find(request.name, request.zone) is not None:
            return
        queue = self.queue_seconds.get(request.zone, 10.0) if provider == "tpu" else 5.0
        if queue is None:
            self.world.fault("requests without capacity")
            raise RequestRefused(Failure.CAPACITY, "no capacity")
        price = self.prices[request.slice, request.zone]
        machine = Machine(request, provider, price, self.world.now)
        self.machines.append(machine)
        self.world.note(f"cloud: {request.name} in {request.zone} is requested, limit {request.limit_seconds} s")
        self.world.after(queue, lambda: self._start(machine))

    def _start(self, machine: Machine) -> None:
        if not machine.is_listed:
            return
        machine.state, machine.ready_at = SliceState.READY, self.world.now
        self.world.note(f"cloud: {machine.request.name} is ready")
        limit = machine.request.limit_seconds
        if self.has_limit and limit is not None:
            self.world.after(limit, lambda: self.delete(machine, "the API's limit"))
        self.on_ready(machine)

    def delete(self, machine: Machine, actor: str) -> None:
        if not machine.is_listed:
            return
        machine.is_listed = False
        self.world.note(f"cloud: {machine.request.name} is deleted by {actor}")
        self._end(machine, SliceState.ABSENT)

    def preempt(self, machine: Machine) -> None:
        if machine.runs:
            machine.is_preempted = True
            self.world.fault("preemptions", f"cloud: {machine.request.name} is preempted")
            self._end(machine, SliceState.PREEMPTED)

    def _end(self, machine: Machine, state: SliceState) -> None:
        was_running = machine.runs
        machine.state = state
        if was_running:
            machine.gone_at = self.world.now
            self.on_gone(machine)


class SimulatedProvider:
    """The cloud as one process uses it. Implements `forerun.cloud.provider.Provider`."""

    def __init__(self, cloud: Cloud, process: Process, name: str = "tpu") -> None:
        self.cloud, self.process, self.name = cloud, process, name

    def now(self) -> float:
        self.process.call("api")
        return self.cloud.time()

    def enforces_limit(self, request: SliceRequest) -> bool:
        return self.cloud.has_limit

    def create(self, request: SliceRequest) -> None:
        self.process.call("api")
        self.cloud.create(request, self.name)
        self.process.answer("api")

    def status(self, name: str, zone: str) -> SliceStatus:
        self.process.call("api")
        machine = self.cloud.find(name, zone)
        if machine is None:
            past = self.cloud.past(name, zone)
            if past is None or not self.cloud.tells_times:
                return SliceStatus(SliceState.ABSENT)
            return SliceStatus(SliceState.ABSENT, ready_at=past.ready_at, ended_at=past.gone_at)
        machine.see(self.process)
        if not self.cloud.tells_times:
            return SliceStatus(machine.state)
        return SliceStatus(machine.state, ready_at=machine.ready_at, ended_at=machine.gone_at)

    def delete(self, name: str, zone: str) -> float | None:
        self.process.call("api")
        machine = self.cloud.find(name, zone)
        if machine is not None:
            self.cloud.delete(machine, self.process.name)
        else:
            machine = self.cloud.past(name, zone)
        self.process.answer("api")
        return machine.gone_at if machine is not None and self.cloud.tells_times else None

    def list(self) -> Sequence[Resource]:
        self.process.call("api")
        return [
            Resource(
                self.name,
                "node",
                machine.request.name,
                machine.request.zone,
                SliceStatus(machine.state, ready_at=machine.ready_at if self.cloud.tells_times else None),
                dict(machine.request.labels),
                dict(machine.request.metadata),
                machine.request.slice,
                machine.request.capacity,
                machine.requested_at,
            )
            for machine in self.cloud.machines
            if machine.is_listed and machine.provider == self.name
        ]

    def addresses(self, name: str, zone: str) -> Sequence[HostAddress]:
        self.process.call("api")
        machine = self.cloud.find(name, zone)
        if machine is None:
            raise CloudUnavailable("the slice does not exist")
        return [HostAddress(host, f"10.0.0.{host}", f"10.0.0.{host}") for host in range(machine.hosts)]

    def host_keys(self, name: str, zone: str) -> Sequence[Sequence[str]]:
        return [["ssh-ed25519 AAAA"] for _ in self.addresses(name, zone)]

    def requests(self, request: SliceRequest) -> Sequence[Mapping[str, object]]:
        return []
