"""The state that all fake APIs share: time, events, machines that are rented, capacity, quota and the bill."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fake.clock import FakeClock
from fake.machines import Machines

FREE_SECONDS = 60  # a slice that is preempted in its first minute costs nothing


@dataclass
class Rental:
    """The machines of one node, instance or instance group, from the request to their end.

    They are billed from `ready_at` to `ended_at`. They occupy capacity from the request to `ended_at`.
    """

    name: str
    zone: str
    slice: str
    hosts: int
    chips: int
    usd_per_hour: float
    spot: bool
    metadata: Mapping[str, str]
    requested_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    preempted: bool = False
    external: bool = True

    def usd(self, now: float) -> float:
        if self.ready_at is None:
            return 0.0
        seconds = (now if self.ended_at is None else self.ended_at) - self.ready_at
        return 0.0 if self.preempted and seconds <= FREE_SECONDS else self.usd_per_hour * seconds / 3600


@dataclass
class Delays:
    """How long changes take, in seconds of the fake's clock. With 0, a change is complete at the next request."""

    create: float = 0.0
    delete: float = 0.0
    queue: float = 0.0  # the shortest time that a queued resource waits


class World:
    """Owns the lock, the clock, and what is rented. Every method expects that the caller holds `lock`."""

    def __init__(self, machines: Machines, delays: Delays, clock: FakeClock | None = None) -> None:
        self.lock = threading.RLock()
        self.clock = clock or FakeClock()
        self.machines, self.delays = machines, delays
        self.rentals: list[Rental] = []
        self.capacity: dict[tuple[str, str], int] = {}
        self.quota: dict[tuple[str, str, bool], int] = {}
        self.quota_users: list[Callable[[], list[tuple[str, str, bool, int]]]] = []
        self.when_capacity_changes: list[Callable[[], None]] = []
        self.when_preempted: list[Callable[[Rental], None]] = []
        self.settings: dict[str, Any] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._moment: float | None = None

    # Time

    def now(self) -> float:
        """Return the time. Inside an event, it is the time for which the event was planned."""
        return self.clock.now() if self._moment is None else self._moment

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now() + seconds, next(self._order), event))

    def settle(self) -> None:
        """Run all events that are due. Events that these plan for the same moment wait for the next call."""
        limit = next(self._order)
        later = []
        while self._events and self._events[0][0] <= self.clock.now():
            at, order, event = heapq.heappop(self._events)
            if order > limit:
                later.append((at, order, event))
                continue
            self._moment = at
            try:
                event()
            finally:
                self._moment = None
        for one in later:
            heapq.heappush(self._events, one)

    def advance(self, seconds: float) -> None:
        """Move the clock, and run every event on the way at its own time."""
        end = self.clock.now() + seconds
        while self._events and self._events[0][0] <= end:
            self.clock.move_to(self._events[0][0])
            self.settle()
        self.clock.move_to(end)

    # Machines

    def free_capacity(self, zone: str, slice_name: str) -> bool:
        most = self.capacity.get((zone, slice_name))
        used = sum((one.zone, one.slice) == (zone, slice_name) and one.ended_at is None for one in self.rentals)
        return most is None or used < most

    def set_capacity(self, zone: str, slice_name: str, count: int | None) -> None:
        if count is None:
            self.capacity.pop((zone, slice_name), None)
        else:
            self.capacity[zone, slice_name] = count
        self.capacity_changed()

    def capacity_changed(self) -> None:
        for listener in self.when_capacity_changes:
            self.after(0, listener)

    def quota_left(self, zone: str, generation: str, *, spot: bool) -> int | None:
        """Return how many more chips the project may request, or None without a limit."""
        limit = self.quota.get((zone, generation, spot))
        if limit is None:
            return None
        users = itertools.chain.from_iterable(user() for user in self.quota_users)
        return limit - sum(chips for place, kind, low, chips in users if (place, kind, low) == (zone, generation, spot))

    def rent(self, rental: Rental, ready: Callable[[float], None], broken: Callable[[str], None]) -> None:
        """Occupy capacity and start the machines; call `ready` when they run."""
        self.rentals.append(rental)

        def started() -> None:
            if rental.ended_at is None:
                rental.ready_at = self.now()
                ready(rental.ready_at)

        def start() -> None:
            try:
                self.machines.start(rental.name, rental.zone, rental.hosts, rental.metadata, rental.slice)
            except Exception as error:  # the test must see why its machines did not start
                with self.lock:
                    self.end(rental)
                    broken(f"{type(error).__name__}: {error}")
                return
            with self.lock:
                if rental.ended_at is not None:
                    threading.Thread(target=self._stop, args=(rental, True)).start()
                self.after(0, started)

        if type(self.machines).__name__ == "NoMachines":
            start()
        else:
            threading.Thread(target=start, daemon=True).start()

    def end(self, rental: Rental, *, preempted: bool = False, kill: bool = True) -> None:
        """Stop the machines; billing and the use of capacity end now. Do nothing if they have ended."""
        if rental.ended_at is not None:
            return
        rental.ended_at, rental.preempted = self.now(), preempted
        if type(self.machines).__name__ == "NoMachines":
            self._stop(rental, kill)
        else:
            threading.Thread(target=self._stop, args=(rental, kill)).start()
        self.capacity_changed()

    def _stop(self, rental: Rental, kill: bool) -> None:
        self.machines.stop(rental.name, kill=kill)

    def preempt(self, name: str, notice_seconds: float) -> bool:
        """Take the machines of a slice after `notice_seconds`. Return False if there is no such slice."""
        rental = self.running(name)
        if rental is None:
            return False

        def take() -> None:
            if rental.ended_at is None:
                self.end(rental, preempted=True)
                for listener in self.when_preempted:
                    listener(rental)

        if notice_seconds > 0:
            self.machines.notice(name)
            self.after(notice_seconds, take)
        else:
            take()
        return True

    def running(self, name: str) -> Rental | None:
        return next((one for one in self.rentals if one.name == name and one.ended_at is None), None)

    def bill(self) -> dict[str, float]:
        """Return the cost of each name until now, in USD."""
        total: dict[str, float] = {}
        for rental in self.rentals:
            total[rental.name] = total.get(rental.name, 0.0) + rental.usd(self.now())
        return total


@dataclass
class ApiFault(Exception):
    """An answer of the API that is an error."""

    http: int
    status: str
    message: str
    reason: str = ""
    details: list[Any] = field(default_factory=list)


def not_found(name: str) -> ApiFault:
    return ApiFault(404, "NOT_FOUND", f"Resource '{name}' was not found")


def invalid(message: str) -> ApiFault:
    return ApiFault(400, "INVALID_ARGUMENT", message)
