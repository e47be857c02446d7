"""A host with the real agent, whose threads are replaced by calls in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from simulation.bucket import BucketFolder
from simulation.process import Killed, Process

from forerun.cloud.host import agent as agent_module
from forerun.cloud.host.agent import Agent, AgentTimes
from forerun.cloud.host.bucket_link import BucketLink
from forerun.cloud.host.layout import HostLayout
from forerun.cloud.host.results import ResultStore
from forerun.cloud.host.service import ServiceState
from forerun.cloud.host.settings import read_settings
from forerun.cloud.host.train_progress import TrainProgress
from forerun.cloud.record.entries import HostEntry
from forerun.cloud.record.run_files import RunFiles

if TYPE_CHECKING:
    from simulation.guest import Guest

RESTART_SECONDS = 5.0  # RestartSec= of the agent's unit
_ACTIVE: list[AgentHost] = []  # the host whose agent acts now, as the only element


class SerialLink(BucketLink):
    """A link without a thread: the host calls `exchange_once`."""

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def flush(self, limit_seconds: float) -> bool:
        return self.exchange_once()

    def exchange_once(self) -> bool:
        """Exchange the report and the record as the thread of the link does. Return whether it succeeded."""
        try:
            self.exchange(self._report, is_ending=self._is_ending)
        except Exception as error:
            self._tell(f"bucket: {type(error).__name__}")
            return False
        return True


class SerialResults(ResultStore):
    """A store of results whose thread is an event."""

    _is_scheduled = False

    def start(self) -> None:
        host = _ACTIVE[0]
        if self._is_scheduled or self.is_done:
            return
        self._is_scheduled = True
        context = host.guest.context
        context.world.after(context.plan.export_seconds, lambda: self._finish(host))

    def _finish(self, host: AgentHost) -> None:
        self._is_scheduled = False
        if host.guest.lives and host.agent is not None and host.agent._results is self and not self._is_cancelled:
            try:
                self._work()
            except Killed:
                host.restart_later()

    def cancel(self) -> None:
        self._is_cancelled = True


class AgentHost:
    """One host of a slice: its disk, its clocks and its agent."""

    def __init__(self, guest: Guest, index: int) -> None:
        self.guest, self.index = guest, index
        context = guest.context
        self.layout = HostLayout(context.disk / f"{guest.machine.request.name}-{guest.machine.request.zone}-{index}")
        self.settings_file = self.layout.settings
        self.booted_at = context.world.now
        self.process = self._process()
        self.agent: Agent | None = None
        self.has_started = False
        self.is_broken = False
        self.notice = ""

    def set_state(self, text: str) -> None:
        self.layout.setup_state.write_text(text + "\n")

    def start(self) -> None:
        """Start the agent, as systemd does."""
        guest = self.guest
        if not guest.lives or self.is_broken:
            return
        self.has_started = True
        self.process = self._process()
        try:
            with self._acting():
                self.agent = self._agent()
        except Exception as error:
            self._crashed(error)
            return
        self.tick()

    def tick(self) -> None:
        """Run one turn of the agent and its threads."""
        agent = self.agent
        if agent is None or not self.guest.lives or self.is_broken:
            return
        try:
            with self._acting():
                self._exchange(agent)
                agent._clock.refresh() or agent._record_ready()
                phase = agent._last.phase
                if agent.turn():
                    self.agent = None
                    return
                if agent._last.phase != phase:
                    self._exchange(agent)
        except Killed:
            if self.guest.lives:
                self.restart_later()
            return
        except Exception as error:
            self._crashed(error)
            return
        self.guest.context.world.after(self.guest.context.plan.poll_seconds, self._tick_of(agent))

    def restart_later(self) -> None:
        self.agent = None
        self.guest.context.world.after(RESTART_SECONDS, self.start)

    def wall(self) -> float:
        return self.guest.context.world.now + self.guest.context.plan.wall_offset

    def monotonic(self) -> float:
        return self.guest.context.world.now - self.booted_at

    def _tick_of(self, agent: Agent) -> Callable[[], None]:
        return lambda: self.tick() if self.agent is agent else None

    def _exchange(self, agent: Agent) -> None:
        context = self.guest.context
        outage = context.faults.outage("bucket", "host", context.world.now)
        if outage is None or outage.kind != "hang":
            link: Any = agent._link
            link.exchange_once()

    def _crashed(self, error: Exception) -> None:
        self.guest.context.problems.append(f"the agent crashed: {type(error).__name__}: {error}")
        self.guest.context.world.note(f"{self.process.name} crashed: {type(error).__name__}: {error}")
        self.restart_later()

    def _process(self) -> Process:
        context = self.guest.context
        name = f"agent {self.guest.machine.attempt}-{self.index}"
        return Process(context.world, context.faults, "host", name)

    @contextmanager
    def _acting(self) -> Iterator[None]:
        _ACTIVE[:] = [self]
        yield

    def _agent(self) -> Agent:
        context = self.guest.context
        settings = read_settings(self.settings_file)
        files = RunFiles(BucketFolder(context.bucket, self.process))
        agent = Agent(
            settings,
            self.layout,
            files,
            self.index,
            context.provider(self.process),
            lambda: self.notice,
            lambda text: context.world.note(f"{self.process.name}: {text}"),
            AgentTimes(),
        )
        agent._clock._fallback, agent._clock._monotonic = self.wall, self.monotonic
        return agent


class HostTime:
    """The module `time` of the host that acts now."""

    @staticmethod
    def time() -> float:
        return _ACTIVE[0].wall()

    @staticmethod
    def monotonic() -> float:
        return _ACTIVE[0].monotonic()


def _training_state(layout: HostLayout) -> ServiceState:
    return _ACTIVE[0].guest.training.service()


def _stop_training(layout: HostLayout) -> None:
    _ACTIVE[0].guest.training.stop()


def _progress(run: Path, host: int) -> TrainProgress:
    return _ACTIVE[0].guest.training.progress()


@contextmanager
def simulated_hosts() -> Iterator[None]:
    """Connect the agent's module to the simulated hosts."""
    replacements = {
        "training_state": _training_state,
        "stop_training": _stop_training,
        "read_progress": _progress,
        "program_of_run": lambda run: None,
        "BucketLink": SerialLink,
        "ResultStore": SerialResults,
        "time": HostTime,
    }
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(mock.patch.object(agent_module, name, value))
        yield


def entry_of(host: AgentHost) -> HostEntry | None:
    """Return the last report of a host's agent."""
    return None if host.agent is None else host.agent._link._report
