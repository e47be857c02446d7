"""Tests of the supervisor of one host, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from forerun.supervise.agent import Agent
from forerun.supervise.child import Child
from forerun.supervise.console import Console
from forerun.supervise.host_address import Hosts
from forerun.supervise.protocol.json_form import decode_from_host
from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import HostBeat, HostUnits, WorkerUnits, WorkerView
from forerun.supervise.protocol.wire import Line, Secret


class RecordingLine:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class RunningChild:
    exit = None
    facts: dict[str, str] = {}  # noqa: RUF012

    def view(self) -> WorkerView:
        return WorkerView("step", 4, 5, save_seconds=12.5)


@pytest.mark.parametrize("units", [0, 5])
def test_the_leader_has_the_newest_save_time_before_the_answer_that_it_decides_on(units: int, tmp_path: Path) -> None:
    """The regular beat may come too late: the leader decides when the last host has answered."""
    console = Console("test")
    agent = Agent([], Hosts(), Secret(b"secret"), {}, tmp_path, Limits(), console, lambda: None, False)
    line = RecordingLine()
    agent._line, agent._child, agent._attempt = cast("Line", line), cast("Child", RunningChild()), 3
    agent._heard(WorkerUnits(units))
    console.close()
    beat, answer = map(decode_from_host, line.sent)
    assert isinstance(beat, HostBeat)
    assert beat.view is not None
    assert beat.view.save_seconds == 12.5
    assert answer == HostUnits(units, 3)
