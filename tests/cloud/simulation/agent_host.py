"""A host with the real agent. Its threads are replaced by calls in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.cloud.host import agent as agent_module
from forerun.cloud.host.agent import Agent
from forerun.cloud.host.settings import HostLayout, read_settings
from forerun.cloud.host.training import ServiceState, TrainProgress
from forerun.cloud.record.run_files import RunFiles
from simulation.bucket import BucketFolder
from simulation.events import TraceReporter
from simulation.process import Killed, Process

if TYPE_CHECKING:
    from pathlib import Path

    from simulation.guest import Guest

RESTART_SECONDS = 5.0  # RestartSec= of the agent's unit


class SimulatedLayout(HostLayout):
    """The file tree of a simulated host, with the ID of its boot."""

    def __init__(self, root: Path, host: AgentHost) -> None:
        super().__init__(root)
        self.host = host

    def boot_id(self) -> str:
        return f"boot-{self.host.boots}"


class AgentHost:
    """One host of a slice: its disk, its clocks and its agent.

    Attributes:
      is_broken: the agent has ended for ever.
      notice: why the cloud will end the machine, or an empty string.
    """

    def __init__(self, guest: Guest, index: int) -> None:
        self.guest, self.index = guest, index
        context, request = guest.context, guest.machine.request
        root = context.disk / f"{request.name}-{request.zone}-{index}"
        self.layout = SimulatedLayout(root, self)
        self.booted_at, self.boots = context.world.now, 1
        self.process = self._process()
        self.agent: Agent | None = None
        self.has_started = False
        self.is_broken = False
        self.notice = ""

    def accept(self, settings: bytes) -> None:
        self.layout.state_folder.mkdir(parents=True, exist_ok=True)
        self.layout.settings.write_bytes(settings)

    def set_state(self, text: str) -> None:
        self.layout.setup_state.write_text(text + "\n")

    def start(self) -> None:
        """Start the agent, as systemd does."""
        if not self.guest.lives or self.is_broken:
            return
        self.has_started = True
        self.process = self._process()
        try:
            self.agent = self._agent()
        except Exception as error:
            self._crashed(error)
            return
        self.tick()

    def tick(self) -> None:
        """Run one turn of the agent and its threads."""
        agent, context = self.agent, self.guest.context
        if agent is None or not self.guest.lives or self.is_broken:
            return
        _ACTIVE[:] = [self]
        try:
            self._exchange(agent)
            agent.ask_cloud()
            phase = agent._last.phase
            if agent.turn():
                self.agent = None
                return
            if agent._last.phase != phase:
                self._exchange(agent)
        except Killed:
            self.restart_later()
            return
        except Exception as error:
            self._crashed(error)
            return
        context.world.after(context.plan.poll_seconds, lambda: self.tick() if self.agent is agent else None)

    def restart_later(self) -> None:
        """Start the agent again, unless its machine has ended."""
        self.agent = None
        if self.guest.lives:
            self.guest.context.world.after(RESTART_SECONDS, self.start)

    def reboot(self) -> None:
        """End the agent with the operating system. The clock that counts from the boot begins again."""
        self.process.is_killed = True
        self.agent = None
        self.boots += 1
        self.booted_at = self.guest.context.world.now

    def wall(self) -> float:
        return self.guest.context.world.now + self.guest.context.plan.wall_offset

    def monotonic(self) -> float:
        return self.guest.context.world.now - self.booted_at

    def state(self) -> ServiceState:
        """Return the state of the training service."""
        return self.guest.training.service()

    def stop(self) -> None:
        """Stop the training service."""
        self.guest.training.stop()

    def background(self, work: Callable[[], None], name: str) -> None:
        """Run the export of the agent that acts now, after the time that it takes."""
        agent, context = self.agent, self.guest.context

        def finish() -> None:
            if self.guest.lives and self.agent is agent:
                try:
                    work()
                except Killed:
                    self.restart_later()

        context.world.after(context.plan.export_seconds, finish)

    def _exchange(self, agent: Agent) -> None:
        context = self.guest.context
        outage = context.faults.outage("bucket", "host", context.world.now)
        if outage is None or outage.kind != "hang":
            agent.exchange()

    def _crashed(self, error: Exception) -> None:
        text = f"the agent crashed: {type(error).__name__}: {error}"
        self.guest.context.on_problem(text)
        self.restart_later()

    def _process(self) -> Process:
        context = self.guest.context
        name = f"agent {self.guest.machine.attempt}-{self.index}"
        return Process(context.world, context.faults, "host", name)

    def _agent(self) -> Agent:
        context = self.guest.context
        return Agent(
            read_settings(self.layout.settings),
            self.layout,
            RunFiles(BucketFolder(context.bucket, self.process)),
            self.index,
            context.provider(self.process),
            lambda: self.notice,
            TraceReporter(context.world, self.process.name),
            wall=self.wall,
            monotonic=self.monotonic,
            service=self,
            start=self.background,
        )


_ACTIVE: list[AgentHost] = []  # the host whose agent acts now, as the only element


def progress_of_active(run: Path, host: int) -> TrainProgress:
    """Return the progress of the training, in place of `read_progress`, which reads many files."""
    return _ACTIVE[0].guest.training.progress()


REPLACEMENTS = {"read_progress": progress_of_active, "program_of_run": lambda run: None}
assert all(hasattr(agent_module, name) for name in REPLACEMENTS)
