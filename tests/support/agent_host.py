"""A host of a run: an agent in a temporary file tree, with a `systemctl` and a `forerun` that record their calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from recording_reporter import RecordingReporter

from forerun.cloud.host.agent import Agent, AgentTimes
from forerun.cloud.host.settings import AgentSettings, HostLayout
from forerun.cloud.host.training import ServiceState, parse_state
from forerun.cloud.provider import CloudUnavailable, SliceState, SliceStatus
from forerun.cloud.record.entries import AttemptEntry, HostEntry, Option, ReadyEntry
from forerun.cloud.record.read_entry import DamagedEntry
from forerun.cloud.record.run_files import RunFiles

SYSTEMCTL = """#!/bin/sh
if [ "$1" = show ]; then cat {unit}; fi
if [ "$1" = stop ]; then
  echo "$*" >> {calls}
  if [ -f {checkpoint} ]; then printf 'ActiveState=failed\\nExecMainCode=1\\nExecMainStatus=75\\n' > {unit}; fi
fi
"""
FORERUN = """#!/bin/sh
echo "$JAX_PLATFORMS $*" >> {calls}
mkdir -p {export}/sub
printf weights > {export}/model.safetensors
printf '{{}}' > {export}/sub/config.json
"""
RUNNING = "ActiveState=active\nExecMainCode=0\nExecMainStatus=0\n"
ENDED = "ActiveState=inactive\nExecMainCode=1\nExecMainStatus={}\n"
OPTION = Option("tpu", "v6e-8", "us-east5-b", "spot", 1, 21.6)
LIMIT_SECONDS = 3600


class StubApi:
    """A provider that records deletions. `fails` is how many calls of `delete` raise."""

    def __init__(self, now: float) -> None:
        self.time, self.fails = now, 0
        self.ready_at: float | None = 1000.0
        self.is_down = False
        self.deleted: list[tuple[str, str]] = []

    def now(self) -> float:
        if self.is_down:
            raise CloudUnavailable("down")
        return self.time

    def status(self, name: str, zone: str) -> SliceStatus:
        if self.is_down:
            raise CloudUnavailable("down")
        return SliceStatus(SliceState.READY, ready_at=self.ready_at)

    def delete(self, name: str, zone: str) -> float | None:
        if self.fails:
            self.fails -= 1
            raise CloudUnavailable("down")
        self.deleted.append((name, zone))
        return None


class Host:
    """A file tree of a host, its bucket folder and its API."""

    def __init__(self, folder: Path) -> None:
        self.layout = HostLayout(folder / "root")
        self.files = RunFiles(str(folder / "bucket"))
        self.api = StubApi(1010.0)
        self.uptime, self.wall = 200.0, self.api.time  # of agents that `stepped` returns
        self.said: list[str] = []  # the agent's log
        self.calls, self.unit, self.checkpoint = folder / "calls", folder / "unit", folder / "checkpoint"
        self.run = self.layout.job_folder / "runs/tiny"
        names = {"unit": self.unit, "calls": self.calls, "checkpoint": self.checkpoint, "export": self.layout.export}
        for path, text in (
            (self.layout.root / "usr/bin/systemctl", SYSTEMCTL.format(**names)),
            (self.layout.forerun, FORERUN.format(**names)),
        ):
            path.parent.mkdir(parents=True)
            path.write_text(text)
            path.chmod(0o755)
        self.run.mkdir(parents=True)
        self.layout.log_folder.mkdir(parents=True)
        self.layout.setup_state.write_text("started\n")
        self.unit.write_text(RUNNING)
        self.checkpoint.touch()
        self.files.create_attempt(AttemptEntry(1, OPTION, "forerun-tiny-1", 900.0, LIMIT_SECONDS, 0.0))
        self.files.create_ready(1, ReadyEntry(1000.0))

    def pass_time(self, seconds: float) -> None:
        """Let time pass for all clocks of agents that `stepped` returned."""
        self.uptime += seconds
        self.wall += seconds
        self.api.time += seconds

    def record(self, name: str, content: bytes) -> None:
        """Replace a file of the run's record."""
        self.files.files.replace(name, content)

    def end_training(self, code: int) -> None:
        self.unit.write_text(ENDED.format(code))

    def agent(self, host: int = 0, hosts: int = 1, *, is_rented: bool = True, notice: str = "") -> Agent:
        api = self.api if is_rented else None
        times = AgentTimes(speed=50.0, flush_seconds=1000.0)
        settings = self.settings(hosts=hosts)
        return Agent(settings, self.layout, self.files, host, api, lambda: notice, RecordingReporter(self.said), times)

    def settings(self, **changes: Any) -> AgentSettings:
        settings = AgentSettings(
            self.files.address, 1, 1, "tiny", "tpu", "forerun-tiny-1", "us-east5-b", limit_seconds=LIMIT_SECONDS
        )
        return replace(settings, **changes)

    def stepped(self, *, has_systemctl: bool = False, **changes: Any) -> SteppedAgent:
        """Return a new agent, as after a restart of its unit. `changes` are those of its settings."""
        return SteppedAgent(self, self.settings(**changes), has_systemctl=has_systemctl)

    @contextmanager
    def running(self, **options: object) -> Iterator[Agent]:
        agent = self.agent(**options)  # type: ignore[arg-type]
        thread = threading.Thread(target=agent.run)
        thread.start()
        try:
            yield agent
        finally:
            agent.close()
            thread.join()

    def report(self, host: int = 0) -> HostEntry | None:
        entry = self.files.hosts(1, host + 1).get(host)
        assert not isinstance(entry, DamagedEntry)
        return entry

    def phase(self, host: int = 0) -> str:
        entry = self.report(host)
        return "" if entry is None else entry.phase


class FailingFolder:
    """A bucket folder whose calls raise if one of their names contains one of `fragments`."""

    def __init__(self, folder: Any, *fragments: str) -> None:
        self._folder, self._fragments = folder, fragments

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if any(fragment in str(arguments[:1]) for fragment in self._fragments):
                raise PermissionError("403")
            return getattr(self._folder, name)(*arguments)

        return call


class UnitFile:
    """The training service of a host without the process of `systemctl`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def state(self) -> ServiceState | None:
        return parse_state(self._host.unit.read_text())

    def stop(self) -> None:
        with self._host.calls.open("a") as calls:
            calls.write("stop\n")


class SteppedAgent:
    """An agent without threads and real time. `host.uptime` is its monotonic clock, `host.api.time` the cloud's.

    Attributes:
      ask_cloud: the agent asks the cloud in each step.
    """

    def __init__(self, host: Host, settings: AgentSettings, *, has_systemctl: bool = False) -> None:
        self.host, self.ask_cloud = host, True
        self.agent = Agent(
            settings,
            host.layout,
            host.files,
            0,
            host.api,
            lambda: "",
            RecordingReporter(host.said),
            wall=lambda: host.wall,
            monotonic=lambda: host.uptime,
            start=lambda work, name: work(),
            service=None if has_systemctl else UnitFile(host),
        )

    def step(self, seconds: float = 1.0, *, exchange: bool = True) -> bool:
        """Let time pass for all clocks, and make one turn."""
        self.host.pass_time(seconds)
        if self.ask_cloud:
            self.agent.ask_cloud()
        self.agent.turn()
        return self.agent.exchange() if exchange else False

    def seconds_until_deletion(self, limit_seconds: float, step_seconds: float = 10.0) -> float | None:
        """Return how much time passes until the slice is deleted, or None if it exists after `limit_seconds`."""
        begin = self.host.uptime
        while not self.host.api.deleted and self.host.uptime - begin < limit_seconds:
            # Nothing happens long before a deadline, and each step writes a file durably.
            view = self.agent.view()
            is_early = view.deadline_at is None or view.now < view.deadline_at - 600.0
            self.step(300.0 if is_early else step_seconds, exchange=False)
        return self.host.uptime - begin if self.host.api.deleted else None
