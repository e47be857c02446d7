"""A simulated cluster for tests of `decide`: hosts, workers, connections and a clock, driven by a random generator.

The simulation knows the truth (which worker runs where), which the leader only learns from messages. It checks the
leader's actions against the truth, with its own arithmetic.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from forerun.errors import StorageError, UserError
from forerun.supervise.host_address import Hosts
from forerun.supervise.leader.actions import (
    Action,
    Finish,
    Send,
    StartWorkers,
)
from forerun.supervise.leader.decide import decide
from forerun.supervise.leader.leader_view import (
    Event,
    FinishedJob,
    HostDisconnected,
    HostJoined,
    LeaderSuspended,
    LeaderView,
    MessageReceived,
    MistakeFound,
    StartFailed,
    update,
)
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import (
    AskStacks,
    AskUnits,
    Ending,
    EndWorker,
    Exited,
    FromHost,
    FromLeader,
    Hello,
    HostBeat,
    HostStacks,
    HostUnits,
    Idle,
    StartWorker,
    StopAfter,
    StopNotice,
    WorkerView,
)
from forerun.supervise.slice_policy import SlicePolicy

STEPS = 12
MAX_TURNS = 4000
CRASHES = (1, -9, -6, 70, 76)


@dataclass
class SimulatedWorker:
    attempt: int
    step: int = 0
    save_seconds: float | None = None
    stuck: bool = False
    holds: bool = False  # it was asked for its units, and begins no other
    last: int | None = None  # the unit after which it stops


@dataclass
class SimulatedHost:
    index: int
    connected: bool = False
    frozen: bool = False
    away_until: float = 0.0  # it connects after this time
    instance: int = 0
    worker: SimulatedWorker | None = None
    orders: deque[FromLeader] = field(default_factory=deque)
    reports: deque[FromHost] = field(default_factory=deque)

    def report(self, message: FromHost) -> None:
        if self.connected:
            self.reports.append(message)

    def beat(self) -> None:
        worker = self.worker
        if worker is None:
            self.report(HostBeat())
            return
        view = WorkerView(
            "step", worker.step, worker.step, 99.0 if worker.stuck else 0.0, 10.0, save_seconds=worker.save_seconds
        )
        self.report(HostBeat(worker.attempt, view, {}))

    def leave(self, code: int, *, ended: bool = False) -> None:
        """End the worker."""
        worker, self.worker = self.worker, None
        if worker is not None:
            self.report(Exited(code, ended, "", worker.step, worker.attempt))

    def disconnect(self) -> None:
        """Lose the connection. The supervisor ends its worker, unless it is frozen."""
        self.connected = False
        self.orders.clear()
        self.reports.clear()
        if not self.frozen:
            self.worker = None

    def obey(self, order: FromLeader) -> None:
        match order:
            case StartWorker(attempt):
                self.leave(-9, ended=True)
                self.worker = SimulatedWorker(attempt)
            case EndWorker(attempt):
                self.leave(-9, ended=True)
                self.report(Idle(attempt))
            case AskUnits():
                if self.worker is not None:
                    self.worker.holds = True
                    self.beat()
                    self.report(HostUnits(self.worker.step, self.worker.attempt))
            case StopAfter(units):
                if self.worker is not None:
                    self.worker.last = units
            case AskStacks():
                if self.worker is not None:
                    self.report(HostStacks("text", ("main (train.py:1)",), 0.0, self.worker.attempt))


class World:
    """One job. `hopeless` workers crash in every attempt; an `absent` host never connects."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        chance = self.chance
        self.limits = Limits(
            restarts=chance.randint(0, 3), gather=30.0, reconnect=30.0, storage=chance.choice([0.0, 20.0]), stacks=1.0
        )
        self.hosts = [SimulatedHost(index) for index in range(chance.randint(1, 4))]
        self.faults = chance.choice([0, 1, 2, 4, 8])
        self.hopeless, self.absent = chance.random() < 0.05, chance.random() < 0.03
        self.now = 0.0
        self.first = chance.randint(0, 5)
        hosts = Hosts(0, len(self.hosts), "10.0.0.1", 1)
        self.policy = slice_policy(len(self.hosts), random.Random(f"slices {seed}"))
        self.view = LeaderView.at_start(hosts, self.limits, self.first, "supervise", 0.0, self.policy)
        self.taking_part: tuple[int, ...] = ()  # in the running attempt, or in the last one
        self.ended_seconds = 0.0  # when the last attempt was ended
        self.growing = False  # the workers stop for more slices, and the job does not end with it
        self.seen = Counter[str]()
        self.ending: Ending | None = None
        self.storage_fails = self.stop_known = self.complete = False
        self.running = self.ended = self.first
        self.best, self.reached, self.fruitless = 0, 0, 0
        self.asked, self.stopped = {True: False, False: False}, {True: False, False: False}
        self.units: dict[int, int] = {}
        self.saves: dict[int, float | None] = {}

    def run(self) -> Ending:
        """Simulate until the job is over. Fail if it never is."""
        for _ in range(MAX_TURNS):
            self.turn()
            if self.ending is not None:
                self.check_silence_afterwards()
                return self.ending
        raise AssertionError(f"seed {self.seed}: the job never ends: {self.view}")

    # The cluster

    def turn(self) -> None:
        chance = self.chance
        self.now += chance.choice([0.0, 0.1, 0.6, 1.5])
        for host in chance.sample(self.hosts, len(self.hosts)):
            self.act(host)
        self.do_common_step()
        if self.faults and chance.random() < 0.08:
            self.faults -= 1
            self.strike(chance.choice(self.hosts))
        for host in self.hosts:
            if host.connected and self.now - self.view.members[host.index].heard > self.limits.lost:
                host.disconnect()
                self.tell(HostDisconnected(host.index))
        if chance.random() < 0.8:
            self.lead()

    def act(self, host: SimulatedHost) -> None:
        """Let a supervisor connect, obey an order and report. Each may also happen later."""
        chance = self.chance
        if host.frozen:
            if chance.random() < 0.1:
                host.frozen = False
                if not host.connected:
                    host.worker = None
            return
        if not host.connected:
            late = self.now < host.away_until or (self.absent and host.index == len(self.hosts) - 1)
            if chance.random() < 0.5 and not late:
                host.connected = True
                host.worker = None
                self.tell(HostJoined(Hello(host.index, len(self.hosts), str(host.instance), "vm", 1, {})))
            return
        host.beat()
        while host.orders and chance.random() < 0.8:
            host.obey(host.orders.popleft())
        while host.reports and chance.random() < 0.9:
            self.deliver(host)

    def do_common_step(self) -> None:
        """Let all workers do a step together, as collectives demand."""
        hosts = [self.hosts[index] for index in self.taking_part]
        for host in hosts:  # a worker that is done leaves, and does not wait for the others
            worker = host.worker
            if worker is None or worker.last is None or host.frozen or worker.stuck:
                continue
            if worker.attempt == self.running and worker.step >= worker.last:
                host.leave(75)
        workers = [host.worker for host in hosts if host.worker is not None and not host.frozen]
        together = len(workers) == len(hosts) > 0 and len({worker.attempt for worker in workers}) == 1
        if not together or any(worker.stuck for worker in workers):
            return
        if any(worker.holds and worker.last is None for worker in workers):
            return
        for host, worker in zip(hosts, workers, strict=True):
            worker.step += 1
            if self.chance.random() < 0.3:
                worker.save_seconds = self.chance.choice([0.5, 5.0, 40.0])
            if worker.step >= STEPS:
                host.leave(0)
            elif self.hopeless and host.index == 0 and worker.step >= 2:
                host.leave(1)

    def strike(self, host: SimulatedHost) -> None:
        fault = self.chance.choice(
            ["crash", "crash", "mistake", "storage", "cut", "restart", "freeze", "stuck", "stop", "start", "leader"]
        )
        if self.policy.is_elastic and self.chance.random() < 0.5:
            host, fault = self.hosts[-1], "restart"  # the last slice is lost
        self.seen[fault] += 1
        match fault:
            case "crash":
                host.leave(self.chance.choice(CRASHES))
            case "mistake" if self.chance.random() < 0.3:
                self.tell(MistakeFound(UserError("E-HOSTS-999", "what", why="why", fix="fix")))
            case "storage":
                host.leave(74)
            case "cut" | "restart":
                if host.connected:
                    host.instance += fault == "restart"
                    host.away_until = self.now + self.chance.choice([0.0, 4.0, 25.0])
                    host.disconnect()
                    self.tell(HostDisconnected(host.index))
            case "freeze":
                host.frozen = True
            case "stuck":
                if host.worker is not None:
                    host.worker.stuck = True
            case "stop":
                host.report(StopNotice("SIGTERM", self.chance.choice([0.0, 3.0, 30.0])))
            case "start":
                self.storage_fails = True
            case "leader":
                self.now += 20.0
                self.tell(LeaderSuspended(20.0))

    def deliver(self, host: SimulatedHost) -> None:
        message = host.reports.popleft()
        if getattr(message, "attempt", None) == self.running:
            match message:
                case HostBeat(view=WorkerView() as view):
                    self.reached = max(self.reached, view.step)
                    self.saves[host.index] = view.save_seconds
                case Exited():
                    self.reached = max(self.reached, message.step)
                case HostUnits():
                    self.units[host.index] = message.units
        self.stop_known = self.stop_known or isinstance(message, StopNotice)
        self.tell(MessageReceived(host.index, message))

    def tell(self, event: Event) -> None:
        self.view = update(self.view, event, self.now)

    # The leader

    def lead(self) -> None:
        decision = decide(self.view, self.now)
        self.view = decision.view
        for action in decision.actions:
            assert self.ending is None, f"seed {self.seed}: {action} after the end of the job"
            self.seen[type(action.message if isinstance(action, Send) else action).__name__] += 1
            self.execute(action)
        assert (self.ending is not None) == isinstance(self.view.phase, FinishedJob)

    def execute(self, action: Action) -> None:
        match action:
            case StartWorkers():
                self.start(action)
            case Send(EndWorker(attempt) as message):
                assert attempt == self.running > self.ended, f"seed {self.seed}: ends attempt {attempt} twice"
                self.ended, self.ended_seconds = attempt, self.now
                exits = [self.view.members[index].exit for index in self.taking_part]
                self.complete = all(found is not None and found.code == 0 for found in exits)
                fine = all(found is not None and not found.ended and found.code in (0, 75) for found in exits)
                self.growing = self.growing and fine
                self.send(message)
            case Send(AskUnits(_, ends_job) as message, hosts):
                assert self.stop_known if ends_job else self.may_grow()
                assert not self.asked[ends_job], f"seed {self.seed}: asks twice"
                self.asked[ends_job] = True
                self.send(message, hosts)
            case Send(StopAfter(units, save, seconds, ends_job) as message, hosts):
                assert hosts is not None
                self.check_stop(hosts, units, seconds, save=save, ends_job=ends_job)
                self.growing = not ends_job
                self.send(message, hosts)
            case Send(AskStacks() as message):
                self.send(message)
            case Finish(ending):
                self.ending = ending

    def may_grow(self) -> bool:
        """Whether a slice that does not take part is complete: all its hosts are connected."""
        per = self.policy.hosts_per_slice
        others = [host for host in self.hosts if host.index not in self.taking_part]
        slices = {host.index // per for host in others}
        return any(all(host.connected for host in others if host.index // per == number) for number in slices)

    def send(self, order: FromLeader, hosts: tuple[int, ...] | None = None) -> None:
        for host in self.hosts:
            if host.connected and (hosts is None or host.index in hosts):
                host.orders.append(order)

    def start(self, start: StartWorkers) -> None:
        attempt = start.attempt
        where = f"seed {self.seed}, attempt {attempt}"
        assert attempt == self.running + 1, f"{where}: after {self.running}"
        assert self.ended == self.running, f"{where}: the last attempt was not ended"
        self.check_hosts(start, where)
        assert not self.stop_known, f"{where}: after a stop"
        assert not self.complete, f"{where}: the job is complete"
        if self.storage_fails:
            self.storage_fails = False
            self.tell(StartFailed(StorageError("E-HOSTS-021", "what", why="why", fix="fix")))
            return
        if self.growing:
            self.seen["more slices"] += 1
            self.fruitless = 0 if self.reached > self.best else self.fruitless
            self.best = max(self.best, self.reached)
        elif self.running > self.first:
            self.fruitless = 1 if self.reached > self.best else self.fruitless + 1
            self.best = max(self.best, self.reached)
            waits_for_disk = self.limits.storage > 0 and self.seen["storage"] + self.seen["start"] > 0
            assert self.fruitless <= self.limits.restarts or waits_for_disk, f"{where}: try {self.fruitless}"
        self.running, self.reached, self.taking_part = attempt, 0, start.hosts
        self.units, self.saves, self.growing = {}, {}, False
        self.asked[False] = self.stopped[False] = False
        for index, host in enumerate(start.hosts):
            self.send(StartWorker(attempt, index, len(start.hosts), start.slices), (host,))

    def check_hosts(self, start: StartWorkers, where: str) -> None:
        """Check that an attempt has all hosts, or complete slices with the first one, after the waiting time."""
        hosts, per = [self.hosts[index] for index in start.hosts], self.policy.hosts_per_slice
        assert [host.index for host in hosts if host.worker is not None] == [], f"{where}: workers are left"
        assert all(host.connected for host in hosts), f"{where}: a host is absent"
        slices = sorted({index // per for index in start.hosts})
        assert list(start.hosts) == [number * per + rank for number in slices for rank in range(per)], where
        assert start.slices == (None if self.policy.slices == 1 else len(slices)), where
        if len(hosts) == len(self.hosts):
            return
        self.seen["fewer slices"] += 1
        assert slices[0] == 0, f"{where}: without the leader's slice"
        assert len(slices) >= self.policy.least, f"{where}: too few slices"
        for number in set(range(self.policy.slices)) - set(slices):
            # The leader only knows of a connection what it was told, and a host may be silent.
            missing = self.hosts[number * per : (number + 1) * per]
            lost = [self.view.members.get(host.index) for host in missing]
            assert any(one is None or one.is_lost(self.limits, self.now) for one in lost), f"{where}: nothing is lost"
            if number * per in self.taking_part or not self.taking_part:
                waited, wanted = self.now - self.ended_seconds, self.policy.wait_seconds
                if not self.taking_part:  # the first attempt
                    wanted = max(wanted, self.limits.gather)
                assert waited >= wanted, f"{where}: waited {waited} s only"

    def check_stop(self, hosts: tuple[int, ...], units: int, seconds: float, *, save: bool, ends_job: bool) -> None:
        assert self.asked[ends_job]
        assert not self.stopped[ends_job], f"seed {self.seed}: stops twice"
        self.stopped[ends_job] = True
        assert set(hosts) <= set(self.units), f"seed {self.seed}: a host has not answered"
        assert units == max((self.units[host] for host in hosts), default=0)
        known = [found for host in hosts if (found := self.saves.get(host)) is not None]
        fits = 1.5 * max(known) + 1.0 <= seconds if known else seconds > 1.0
        assert save == fits, f"seed {self.seed}: save {save} of {known} s within {seconds} s"
        self.seen["save approved" if save else "save refused"] += 1

    def check_silence_afterwards(self) -> None:
        """A job that is over stays over, whatever the hosts still report."""
        for host in self.hosts:
            host.frozen = False
            self.act(host)
            host.leave(1)
            while host.reports:
                self.deliver(host)
        self.now += 1000.0
        assert [
            type(action) for action in decide(self.view, self.now).actions if isinstance(action, StartWorkers)
        ] == []
        assert isinstance(decide(self.view, self.now).view.phase, FinishedJob)


def slice_policy(hosts: int, chance: random.Random) -> SlicePolicy:
    """Return any policy: hosts that form one slice, or several, of which some may be lost."""
    slices = chance.choice([count for count in range(1, hosts + 1) if hosts % count == 0])
    return SlicePolicy.of(hosts, slices, chance.choice([None, 1, 2]), chance.choice([0.0, 3.0, 20.0]))
