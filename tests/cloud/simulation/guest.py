"""The operating system of a machine: its setup, the agents of its hosts, and the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.cloud.provider import CloudUnavailable, HostAddress
from forerun.cloud.record.entries import AttemptEntry, CloudRun
from forerun.cloud.setup.bundle import agent_settings
from forerun.cloud.setup.startup import LIMIT_MARGIN_SECONDS, SETUP_SECONDS
from simulation.agent_host import AgentHost
from simulation.bucket import Bucket
from simulation.events import World
from simulation.machines import Cloud, Machine
from simulation.process import Faults, Killed, Process
from simulation.training import Job, Training

SETUP_LIMIT, SLICE_LIMIT = "setup-seconds", "limit-seconds"  # metadata in place of the startup script
WATCH_SECONDS = 30.0  # between two turns of the watch of the startup script
REBOOT_SECONDS = 40.0


@dataclass
class GuestPlan:
    """How the machines of a seed behave.

    Attributes:
      has_agent: False: the setup never comes to its end.
      has_watch: False: the watch of the startup script does not work.
      agent_dies_after: seconds after its start, the agent ends for ever; None: never.
      freezes_after: seconds after its start, the machine hangs with all its processes; None: never.
      wall_offset: the error of the hosts' own clocks.
    """

    boot_seconds: float = 20.0
    install_seconds: float = 30.0
    check_seconds: float = 10.0
    poll_seconds: float = 10.0
    export_seconds: float = 20.0
    has_agent: bool = True
    has_watch: bool = True
    agent_dies_after: float | None = None
    freezes_after: float | None = None
    setup_failure: str = ""
    wall_offset: float = 0.0


@dataclass
class GuestContext:
    """What all guests of a seed share."""

    world: World
    cloud: Cloud
    bucket: Bucket
    faults: Faults
    plan: GuestPlan
    job: Job
    disk: Path
    on_write: Callable[[Training, int, str], None]
    provider: Callable[[Process], Any]
    on_problem: Callable[[str], None]
    gaps: list[tuple[float, float]]  # periods in which a host could not act, which the checks allow for


class Guest:
    """The operating systems of all hosts of a slice."""

    def __init__(self, context: GuestContext, machine: Machine) -> None:
        self.context, self.machine = context, machine
        self.is_frozen = False
        self.state = "waiting"
        self.failure = ""
        world, plan = context.world, context.plan
        self.training = Training(world, context.bucket, context.job, machine.attempt, context.on_write)
        self.hosts = [AgentHost(self, index) for index in range(machine.hosts)]
        if plan.freezes_after is not None:
            world.after(plan.freezes_after, self.freeze)
        metadata = machine.request.metadata
        self._setup_seconds = float(metadata.get(SETUP_LIMIT, "inf"))
        self._limit_seconds = float(metadata.get(SLICE_LIMIT) or "inf")
        self._first_boot = world.now
        self._off_until = 0.0  # a reboot lasts until this time
        if plan.has_watch:
            world.after(plan.boot_seconds, self._watch)

    @property
    def lives(self) -> bool:
        return self.machine.runs and not self.is_frozen

    def freeze(self) -> None:
        if self.machine.runs:
            self.context.world.fault("machines that hang", f"{self.machine.request.name} hangs")
            self.is_frozen = True
            self.end()

    def end(self) -> None:
        """End all processes with the machine."""
        self.training.die()
        for host in self.hosts:
            host.process.is_killed = True

    def accept(self, settings: bytes) -> None:
        """Receive the job. The script installs forerun, starts the agents, then the training."""
        world, plan = self.context.world, self.context.plan
        if self.machine.delivered_at is not None or self.is_frozen:
            return
        self.machine.delivered_at = world.now
        world.note(f"{self.machine.request.name} has the job")
        for host in self.hosts:
            host.accept(settings)
        if not plan.has_agent:
            return
        if plan.setup_failure:
            self.failure = plan.setup_failure
            return
        world.after(plan.install_seconds, self._start_agents)

    def _start_agents(self) -> None:
        if not self.lives:
            return
        world, plan = self.context.world, self.context.plan
        for host in self.hosts:
            host.set_state("checking")
            host.start()
        if plan.agent_dies_after is not None:
            world.after(plan.agent_dies_after, self._end_agents)
        world.after(plan.check_seconds, self._start_training)

    def _end_agents(self) -> None:
        self.context.world.note(f"{self.machine.request.name}: the agents end for ever")
        for host in self.hosts:
            host.is_broken = True

    def _start_training(self) -> None:
        if self.lives:
            for host in self.hosts:
                host.set_state("started")
            self.training.start()

    def reboot(self) -> None:
        """End all processes, and start them again as the startup script does."""
        if not self.lives:
            return
        world, plan = self.context.world, self.context.plan
        world.fault("reboots", f"{self.machine.request.name} reboots")
        self._off_until = world.now + REBOOT_SECONDS
        started = any(host.has_started for host in self.hosts)
        self.training.crash(restarts=False)
        for host in self.hosts:
            host.reboot()
        if started:
            world.after(REBOOT_SECONDS, lambda: [host.start() for host in self.hosts])
            world.after(REBOOT_SECONDS + plan.check_seconds, self._start_training)

    def _watch(self) -> None:
        """Delete the slice if no agent has started, or after its limit, as the watch of the startup script does.

        The watch counts the time since the first boot.
        """
        if not self.lives:
            return
        world, request = self.context.world, self.machine.request
        world.after(WATCH_SECONDS, self._watch)
        if world.now < self._off_until:
            return
        counted = world.now - self._first_boot
        has_agent = any(host.has_started for host in self.hosts)
        if counted < self._limit_seconds and (has_agent or counted < self._setup_seconds):
            return
        process = Process(world, self.context.faults, "host", f"the watch of {request.name}")
        try:
            self.context.provider(process).delete(request.name, request.zone)
        except Killed:  # with its machine; or systemd starts it again
            self.context.gaps.append((world.now, world.now + WATCH_SECONDS))
        except Exception as error:
            world.note(f"{process.name}: {type(error).__name__}")


class Delivery:
    """Brings the job to simulated guests, in place of ssh. Implements `JobDelivery`."""

    def __init__(self, context: GuestContext, process: Process) -> None:
        self.context, self.process = context, process

    def metadata(self, run: CloudRun, attempt: AttemptEntry) -> Mapping[str, str]:
        """Return the times of the watch, as `startup_script` computes them."""
        limit = attempt.limit_seconds
        if limit is None:
            return {SETUP_LIMIT: str(SETUP_SECONDS)}
        return {SETUP_LIMIT: str(min(SETUP_SECONDS, limit)), SLICE_LIMIT: str(limit + LIMIT_MARGIN_SECONDS)}

    def deliver(
        self,
        run: CloudRun,
        attempt: AttemptEntry,
        hosts: Sequence[HostAddress],
        host_keys: Sequence[Sequence[str]],
        ready_at: float | None,
    ) -> None:
        self.process.call("ssh")
        guest = self._guest(attempt.resource, attempt.option.zone)
        machine = guest.machine
        if self.context.world.now < (machine.ready_at or 0.0) + self.context.plan.boot_seconds:
            raise CloudUnavailable("the host does not answer to ssh yet")
        guest.accept(agent_settings(run, attempt, "sim", ready_at))

    def setup_failure(self, hosts: Sequence[HostAddress], host_keys: Sequence[Sequence[str]], zone: str) -> str:
        self.process.call("ssh")
        for machine in self.context.cloud.machines:
            if machine.runs and machine.request.zone == zone and isinstance(machine.guest, Guest):
                return machine.guest.failure
        return ""

    def _guest(self, name: str, zone: str) -> Guest:
        machine = self.context.cloud.find(name, zone)
        if machine is None or not isinstance(machine.guest, Guest) or not machine.guest.lives:
            raise CloudUnavailable("the host does not answer to ssh")
        return machine.guest
