"""The time of a host: what moves it, and what does not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from recording_reporter import RecordingReporter

from forerun.cloud.host.host_clock import HostClock
from forerun.cloud.provider import CloudUnavailable

NOW = 1_700_000_000.0


@dataclass
class Clocks:
    """The clocks that a host reads. `cloud` is None while the API does not answer."""

    cloud: float | None = NOW
    wall: float = NOW
    monotonic: float = 100.0
    said: list[str] = field(default_factory=list)

    def pass_time(self, seconds: float) -> None:
        self.cloud = None if self.cloud is None else self.cloud + seconds
        self.wall += seconds
        self.monotonic += seconds

    def ask(self) -> float:
        if self.cloud is None:
            raise CloudUnavailable("down")
        return self.cloud

    def clock(self, file: Path | None = None, boot: str = "b1") -> HostClock:
        return HostClock(
            self.ask,
            lambda: self.wall,
            lambda: self.monotonic,
            file=file,
            boot=boot,
            reporter=RecordingReporter(self.said),
        )


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_the_first_answer_counts_if_the_machine_agrees(clocks: Clocks) -> None:
    clock = clocks.clock()
    assert clock.now() is None
    assert clock.refresh() == ""
    assert clock.now() == NOW
    clocks.pass_time(7.0)
    assert (clock.now(), clock.elapsed_seconds()) == (NOW + 7.0, 7.0)


@pytest.mark.parametrize("error", [-(10**9), -7200.0, 7200.0, 10**8])
def test_one_wrong_answer_changes_nothing(clocks: Clocks, error: float) -> None:
    for answers in (0, 1):  # the wrong answer is the first one, or a later one
        clocks.cloud, clocks.wall = NOW, NOW
        clock = clocks.clock()
        for _ in range(answers):
            clock.refresh()
        begin = clocks.monotonic
        for wrong in (error, 0.0, error, error, 0.0):
            clocks.pass_time(6.0)
            assert clocks.cloud is not None
            clocks.cloud += wrong
            clock.refresh()
            clocks.cloud -= wrong
        assert clock.now() == NOW + 30.0
        assert clock.elapsed_seconds() == clocks.monotonic - begin == 30.0


def test_answers_that_agree_move_the_time_ahead(clocks: Clocks) -> None:
    clock = clocks.clock()
    clock.refresh()
    assert clocks.cloud is not None
    clocks.cloud += 7200.0
    assert [bool(clock.refresh()), bool(clock.refresh()), bool(clock.refresh())] == [True, True, False]
    assert (clock.now(), clock.elapsed_seconds()) == (NOW + 7200.0, 7200.0)


def test_the_time_never_goes_back(clocks: Clocks) -> None:
    clock = clocks.clock()
    clock.refresh()
    for cloud in (NOW - 30.0, 0.0, 0.0, 0.0, 0.0, NOW - 7200.0, NOW - 7200.0, NOW - 7200.0, -5.0, math.nan, math.inf):
        clocks.cloud = cloud
        clock.refresh()
        assert (clock.now(), clock.elapsed_seconds()) == (NOW, 0.0)
    clocks.wall = 0.0
    clocks.pass_time(10.0)
    assert clock.now() == NOW + 10.0


def test_without_an_answer_the_clock_of_the_machine_is_read_once(clocks: Clocks) -> None:
    clocks.cloud = None
    clock = clocks.clock()
    clocks.pass_time(59.0)
    assert clock.refresh()
    assert clock.now() is None
    clocks.pass_time(1.0)
    assert clock.now() == NOW + 60.0
    clocks.wall += 7200.0  # NTP corrects it
    assert (clock.now(), clock.elapsed_seconds()) == (NOW + 60.0, 60.0)
    clocks.cloud = NOW + 55.0  # the first answer of the cloud replaces it
    assert clock.refresh() == ""
    assert (clock.now(), clock.elapsed_seconds()) == (NOW + 55.0, 60.0)


def test_a_restart_in_the_same_boot_loses_nothing(clocks: Clocks, tmp_path: Path) -> None:
    file = tmp_path / "clock.json"
    clock = clocks.clock(file)
    clock.refresh()
    clock.set_ready(NOW - 60.0)
    clocks.pass_time(50.0)
    clock.save()
    clocks.pass_time(300.0)
    clocks.cloud, clocks.wall = None, 0.0
    again = clocks.clock(file)
    assert (again.now(), again.elapsed_seconds(), again.ready_at) == (NOW + 350.0, 350.0, NOW - 60.0)


@pytest.mark.parametrize("monotonic", [20.0, 5000.0])
def test_a_reboot_counts_by_its_uptime_and_then_by_the_cloud(clocks: Clocks, tmp_path: Path, monotonic: float) -> None:
    file = tmp_path / "clock.json"
    clock = clocks.clock(file)
    clock.refresh()
    clocks.pass_time(1000.0)
    clock.save()
    clocks.pass_time(monotonic + 200.0)
    clocks.monotonic = monotonic
    again = clocks.clock(file, boot="b2")
    assert (again.now(), again.elapsed_seconds()) == (NOW + 1000.0 + monotonic, 1000.0 + monotonic)
    for _ in range(3):
        again.refresh()
    assert (again.now(), again.elapsed_seconds()) == (NOW + 1200.0 + monotonic, 1200.0 + monotonic)


def test_a_disk_that_cannot_be_written_is_reported_once(clocks: Clocks, tmp_path: Path) -> None:
    clock = clocks.clock(tmp_path / "missing" / "clock.json")
    clock.save()
    clock.save()
    assert len(clocks.said) == 1
    (tmp_path / "missing").mkdir()
    clock.save()
    assert len(clocks.said) == 2


@pytest.mark.parametrize("ready_at", [NOW - 90_000.0, 0.0, NOW + 61.0, math.nan, math.inf])
def test_an_absurd_start_of_billing_is_refused(clocks: Clocks, ready_at: float) -> None:
    clock = clocks.clock()
    clock.refresh()
    with pytest.raises(ValueError, match="billing"):
        clock.set_ready(ready_at)
    clock.set_ready(NOW - 80_000.0)
    clock.set_ready(NOW)
    assert clock.ready_at == NOW - 80_000.0
