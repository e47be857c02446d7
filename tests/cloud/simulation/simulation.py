"""One simulation: a seed, its scenario, and what the checks find."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from pydantic import TypeAdapter

from forerun.cloud.control import ledger
from forerun.cloud.host import agent as agent_module
from forerun.cloud.host import host_clock
from forerun.cloud.record import run_files
from forerun.cloud.record.entries import CloudRun, Option, StopEntry
from simulation.agent_host import REPLACEMENTS
from simulation.bucket import FOLDER, Bucket
from simulation.checks import Checks
from simulation.controllers import KEEPER_USD_PER_HOUR, ControllerProcess, KeeperProcess, rent_keeper
from simulation.down import take_everything_down
from simulation.events import START, World
from simulation.guest import REBOOT_SECONDS, Guest, GuestContext
from simulation.machines import HOSTS, Cloud, Machine, SimulatedProvider
from simulation.process import Process, Stuck
from simulation.record_faults import Attacker
from simulation.scenario import HORIZON_SECONDS, Scenario, draw
from simulation.tpu_http import tpu_provider
from simulation.training import CHECKPOINTS, Training

ATTACK_SECONDS = 17.0  # between two repetitions of an attack
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Result:
    """What a simulation found.

    Attributes:
      violations: the invariants that did not hold.
      trace: the events, with their time since the start.
      end: how the run ended, as the first process reported it.
    """

    seed: int
    violations: list[str]
    trace: list[str]
    end: str
    guards: str
    faults: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class Simulation:
    """All parts of one simulation."""

    def __init__(self, seed: int, disk: Path, scenario: Scenario | None = None) -> None:
        self.world = World(seed)
        self.scenario = scenario = draw(self.world.random) if scenario is None else scenario
        self.disk, self.bucket = disk, Bucket()
        self.cloud = Cloud(
            self.world,
            scenario.prices,
            dict(scenario.queue_seconds),
            has_limit="api" in scenario.guards,
            tells_times=scenario.tells_times,
            clock_glitches=scenario.clock_glitches,
            on_ready=self._ready,
            on_gone=self._gone,
        )
        self.checks = Checks(self.world, scenario, self.cloud.machines, self._recorded_cap)
        self.context = GuestContext(
            self.world,
            self.cloud,
            self.bucket,
            scenario.host_faults,
            scenario.guest,
            scenario.job,
            disk / "hosts",
            self._write,
            lambda process: self.providers(process)["tpu"],
            self.checks.fail,
            self.checks.host_gaps,
        )
        self.wanted = self._run()
        self.laptop = ControllerProcess(self, "laptop")
        self.keeper: KeeperProcess | None = None
        self.attacker = Attacker(self.bucket, self.world.random, lambda: self.world.now)

    def providers(self, process: Process) -> dict[str, Any]:
        """Return the providers of a process. In some seeds, that of slices is the real one."""
        providers: dict[str, Any] = {name: SimulatedProvider(self.cloud, process, name) for name in ("tpu", "compute")}
        return providers | ({"tpu": tpu_provider(self.cloud, process)} if self.scenario.provider == "http" else {})

    def cap_of_begin(self, begins: int) -> float | None:
        """Return the cap that the user gives when the command was begun so many times before, or None."""
        if begins == 0:
            return self.scenario.cap_usd
        return self.scenario.later_cap_usd if begins == 1 else None

    def _recorded_cap(self) -> float | None:
        try:
            return float(json.loads(self.bucket.contents["cloud/run.json"])["max_usd"])
        except (KeyError, RecursionError, TypeError, ValueError):  # the attacker writes such files, too
            return None

    def start_keeper(self, run: CloudRun) -> None:
        if self.keeper is None and self.laptop.end is None:
            self.keeper = KeeperProcess(self, rent_keeper(self, run), run)

    def run(self) -> None:
        """Simulate everything, then delete what remains with `forerun down`."""
        world, scenario = self.world, self.scenario
        self.world.note(f"limits: {'+'.join(scenario.guards)}, cap ${scenario.cap_usd}, {scenario.job}")
        world.after(0, self.laptop.start)
        for time, seconds in scenario.laptop_kills:
            world.at(time, lambda seconds=seconds: self.laptop.kill(seconds))
        if scenario.laptop_ends is not None:
            world.at(scenario.laptop_ends, self._end_controllers)
        for time, repeat in scenario.attacks:
            world.at(time, lambda repeat=repeat: self._attack(repeat))
        for time in scenario.agent_kills:
            world.at(time, self._kill_agent)
        for time in scenario.training_kills:
            world.at(time, lambda: [guest.training.crash() for guest in self._guests()])
        for time in scenario.reboots:
            world.at(time, self._reboot)
        for time, notice in scenario.preemptions:
            world.at(time, lambda notice=notice: self._preempt(notice))
        for time, zone, seconds in scenario.capacity_changes:
            world.at(time, lambda zone=zone, seconds=seconds: self.cloud.queue_seconds.update({zone: seconds}))
        if scenario.stop_at is not None:
            world.at(scenario.stop_at, self._stop)
        if scenario.down_at is not None:
            world.at(scenario.down_at, lambda: take_everything_down(self, is_last=False))
        world.run_until(START + HORIZON_SECONDS, self._is_over)
        world.note("the end: forerun down --all")
        self._end_controllers()
        take_everything_down(self, is_last=True)
        self.checks.end(self.bucket.contents)
        if scenario.is_calm and scenario.stop_at is None and scenario.guards[0] == "controller":
            self._check_calm_end()

    def _check_calm_end(self) -> None:
        """Require that a run without faults ends as planned, unless no zone had capacity."""
        if not any(machine.ready_at for machine in self.cloud.machines):
            return
        end = "none" if self.laptop.end is None else self.laptop.end.reason
        is_saved = f"{CHECKPOINTS}{self.scenario.job.steps:06}" in self.bucket.contents
        if (end == "finished" and not is_saved) or end not in ("finished", "budget", "failed"):
            self.checks.fail(f"a run without faults ends as {end}; the last checkpoint exists: {is_saved}")

    def _is_over(self) -> bool:
        alive = any(machine.is_listed for machine in self.cloud.machines)
        laptop = self.laptop.end is not None or self.laptop.is_gone
        return laptop and not alive

    def _end_controllers(self) -> None:
        self.laptop.kill(None)
        self.laptop.is_gone = True
        if self.keeper is not None:
            self.keeper.kill(None)
            self.keeper.is_gone = True

    def _attack(self, repeat: float) -> None:
        text, again = self.attacker.act()
        if not text:
            return
        kind = "forged" if text.startswith("forged") else "damaged" if "damaged" in text else "deleted"
        self.world.fault(f"{kind} record files", f"record: {text}")
        if again is not None and repeat:
            until = self.world.now + repeat

            def once_more() -> None:
                again()
                if self.world.now < until:
                    self.world.after(ATTACK_SECONDS, once_more)

            self.world.after(ATTACK_SECONDS, once_more)

    def _guests(self) -> list[Guest]:
        guests = [machine.guest for machine in self.cloud.machines if machine.runs]
        return [guest for guest in guests if isinstance(guest, Guest)]

    def _kill_agent(self) -> None:
        for guest in self._guests():
            host = guest.hosts[self.world.random.randrange(len(guest.hosts))]
            if host.agent is not None:
                host.process.kill()
                self.checks.host_gaps.append((self.world.now, self.world.now + 2 * MARGIN_SECONDS))

    def _reboot(self) -> None:
        for guest in self._guests():
            guest.reboot()
            self.checks.host_gaps.append((self.world.now, self.world.now + REBOOT_SECONDS + MARGIN_SECONDS))

    def _preempt(self, notice: bool) -> None:
        for machine in self.cloud.machines:
            if machine.runs and isinstance(machine.guest, Guest):
                if not notice:
                    self.cloud.preempt(machine)
                    continue
                for host in machine.guest.hosts:
                    host.notice = "preemption"
                machine.guest.training.stop()
                self.world.after(30.0, lambda machine=machine: self.cloud.preempt(machine))

    def _stop(self) -> None:
        """Request a stop, as `forerun stop --no-wait` does."""
        self.world.note("user: forerun stop")
        process = Process(self.world, type(self.scenario.host_faults)(), "user", "user")
        files = self.laptop.files()
        files.files.process = process  # type: ignore[attr-defined]
        files.request_stop(StopEntry(self.world.now, "forerun stop"))

    def _ready(self, machine: Machine) -> None:
        if machine.is_keeper:
            assert self.keeper is not None
            self.world.after(5.0, self.keeper.start)
        else:
            machine.guest = guest = Guest(self.context, machine)
            self.checks.trainings.append(guest.training)
        self.checks.ready(machine)

    def _gone(self, machine: Machine) -> None:
        if isinstance(machine.guest, Guest):
            self.checks.gone(machine, machine.guest.training)
            machine.guest.end()
        elif self.keeper is not None:
            self.keeper.process.is_killed = True

    def _write(self, training: Training, step: int, phase: str) -> None:
        self.checks.write(training, step, phase, self.bucket.contents.get(f"{CHECKPOINTS}{step:06}"))

    def _run(self) -> CloudRun:
        scenario = self.scenario
        options = tuple(
            Option(
                "tpu",
                scenario.slice,
                zone,
                scenario.capacity,  # type: ignore[arg-type]
                HOSTS[scenario.slice],
                scenario.prices[scenario.slice, zone],
                scenario.job.step_seconds,
                1.0,
            )
            for zone in scenario.zones
        )
        return CloudRun(
            "sim",
            FOLDER,
            "name: sim\n",
            options,
            scenario.cap_usd,
            START,
            export=False,
            keeper=scenario.keeper,
            keeper_usd_per_hour=KEEPER_USD_PER_HOUR if scenario.keeper else 0.0,
            wait_seconds=scenario.wait_seconds,
        )


MARGIN_SECONDS = 10.0


@cache
def _writer(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fast_write_entry(entry: Any) -> bytes:
    """Return the JSON of an entry, in place of `write_entry`, whose indented text takes half of the time."""
    return _writer(type(entry)).dump_json(entry)


def fast_write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file in one step. The simulated machines do not lose power."""
    path.write_bytes(content)


@contextmanager
def disk_folder() -> Iterator[Path]:
    """Yield a folder for the disks of all machines of a simulation, in memory if possible."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def simulate(seed: int, scenario: Scenario | None = None) -> Result:
    """Run the simulation of a seed."""
    with ExitStack() as stack:
        disk = stack.enter_context(disk_folder())
        for name, value in REPLACEMENTS.items():
            stack.enter_context(mock.patch.object(agent_module, name, value))
        for module in (run_files, ledger, host_clock):
            stack.enter_context(mock.patch.object(module, "write_entry", fast_write_entry))
        for module in (ledger, host_clock):
            stack.enter_context(mock.patch.object(module, "atomic_write", fast_write))
        simulation = Simulation(seed, disk, scenario)
        try:
            simulation.run()
        except Stuck:
            simulation.checks.fail("a process makes calls without an end")
        except Exception as error:
            raise RuntimeError(f"seed {seed}: {type(error).__name__}: {error}") from error
    world = simulation.world
    trace = [f"{seconds:8.1f} {text}" for seconds, text in world.trace]
    end = "" if simulation.laptop.end is None else simulation.laptop.end.reason
    guards = "+".join(simulation.scenario.guards)
    return Result(
        seed, simulation.checks.violations, trace, end, guards, dict(world.faults), simulation.checks.figures()
    )
