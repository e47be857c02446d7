from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.data.early import arrival as module
from forerun.data.early.arrival import NICE, StoppedBuildError, UnitArrival, lower_priority
from forerun.data.tokens.build import BuildProgress
from forerun.data.tokens.document import Encoded
from forerun.data.tokens.unit import Unit, UnitWriter
from forerun.errors import UserError
from forerun.storage.folder import LocalFolder

PROGRESS = BuildProgress(1, 4, 0, 0, 1, 4, None)


@pytest.fixture
def units(tmp_path: Path) -> UnitArrival:
    return UnitArrival("data", LocalFolder(tmp_path), [Unit(number, 3, (), 1) for number in range(3)], [])


def write(units: UnitArrival, number: int) -> None:
    UnitWriter(Path(units.folder.address), units.units[number], 256).finish()


def test_a_unit_is_waited_for_and_the_wait_is_shown(units: UnitArrival, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAY_AFTER_SECONDS", 0.0)
    waiting, said = threading.Event(), []

    def say(text: str) -> None:
        said.append(text)
        waiting.set()

    def build(tell: Any) -> None:
        tell(PROGRESS)
        waiting.wait()
        write(units, 1)

    write(units, 0)
    units.speak(say)
    units.start(build)
    found = units.entries(0, 2)
    assert [entry["unit"] for entry in found] == [0, 1]
    assert "waiting for unit 2 of 3" in said[0]
    units.close()
    assert "all 3 units" in said[-1]


def test_the_error_of_the_build_is_raised_where_a_unit_is_waited_for(units: UnitArrival) -> None:
    def build(tell: Any) -> None:
        raise UserError("E-DATA-103", "too many", why="", fix="")

    units.start(build)
    with pytest.raises(UserError) as failed:
        units.entries(0, 1)
    assert failed.value.code == "E-DATA-103"
    with pytest.raises(UserError):
        units.raise_failure()


def test_the_end_of_the_run_ends_the_build_and_every_wait(units: UnitArrival) -> None:
    told, errors = threading.Event(), []

    def build(tell: Any) -> None:
        while True:
            told.set()
            tell(PROGRESS)

    def wait() -> None:
        try:
            units.entries(2, 3)
        except StoppedBuildError as error:
            errors.append(error)

    units.start(build)
    waiter = threading.Thread(target=wait)
    waiter.start()
    told.wait()
    units.close()
    waiter.join()
    assert len(errors) == 1
    assert units._thread is not None
    assert not units._thread.is_alive()
    units.raise_failure()  # a build that was stopped has not failed


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_get_a_lower_priority_and_other_children_keep_theirs() -> None:
    command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with (
        subprocess.Popen([*command, "some.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        for child in (worker, other):
            assert child.stdout is not None
            child.stdout.readline()
        lower_priority("some.worker")
        found = [os.getpriority(os.PRIO_PROCESS, child.pid) for child in (worker, other)]
        for child in (worker, other):
            child.communicate()
    assert found == [max(NICE, mine), mine]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


def test_training_documents_of_earlier_units_are_counted(units: UnitArrival) -> None:
    for number, documents in enumerate((2, 3, 1)):
        writer = UnitWriter(Path(units.folder.address), units.units[number], 256)
        writer.add("train", [Encoded(np.arange(4), None)] * documents)
        writer.add("validation", [Encoded(np.arange(4), None)])
        writer.finish()
    assert [units.documents_before(number) for number in range(4)] == [0, 2, 5, 6]
