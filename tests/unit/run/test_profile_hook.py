"""Profiles of real runs on CPU: the files, the steps in them, and what happens if the range cannot be recorded."""

from __future__ import annotations

import gzip
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData
from recording_reporter import FailingReporter, RecordingReporter

from forerun.config.schema import Job
from forerun.errors import UserError
from forerun.reporter import LineReporter
from forerun.run.profile_hook import ProfileHook, Recording, still_ahead
from forerun.run.step_range import StepRange, range_of
from forerun.run.train import train
from forerun.supervise.worker import silent_worker
from forerun.verbs.profile import profile

MakeJob = Callable[..., Job]


def display(lines: io.StringIO | None = None) -> LineReporter:
    return LineReporter(lines or io.StringIO(), clock=time.monotonic)


def recorded_steps(file: Path) -> list[int]:
    """The numbers of the steps that the host marked."""
    [host] = [plane for plane in ProfileData.from_file(str(file)).planes if plane.name == "/host:CPU"]
    marked = [dict(event.stats) for line in host.lines for event in line.events if event.name == "train"]
    return sorted(stats["step_num"] for stats in marked)


def executions(file: Path) -> int:
    """How often the train step ran."""
    [host] = [plane for plane in ProfileData.from_file(str(file)).planes if plane.name == "/host:CPU"]
    stats = (dict(event.stats) for line in host.lines for event in line.events)
    return len({one["run_id"] for one in stats if one.get("hlo_module") == "jit_step"})


def test_steps_of_a_run(make_job: MakeJob) -> None:
    job, lines = make_job("checkpoint.every=3"), io.StringIO()
    assert train(job, display(lines), profile=StepRange(2, 4)) is not None
    folder = Path(job.runs) / job.name
    [file] = folder.glob("profile/plugins/profile/*/*.xplane.pb")
    assert recorded_steps(file) == [2, 3, 4]
    assert executions(file) == 3
    [trace] = folder.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    text = (folder / "profile" / "profile.txt").read_text()
    assert "1 devices (/device:CPU:0)" in text
    assert text.rstrip() in lines.getvalue()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    [event] = [one for one in events if one["event"] == "profile"]
    assert (event["first"], event["last"]) == (2, 4)
    assert folder / event["folder"] == file.parent

    # The run is finished now, and a profile of it is a mistake instead of nothing.
    with pytest.raises(UserError) as caught:
        train(job, display(), profile=StepRange(2, 4))
    assert caught.value.code == "E-RUN-086"

    # The first step of this process is profiled, too.
    longer = make_job("checkpoint.every=3", "steps=7")
    assert train(longer, display(), profile=StepRange(7, 7)) is not None
    [newer] = set(folder.glob("profile/plugins/profile/*/*.xplane.pb")) - {file}
    assert recorded_steps(newer) == [7]
    assert executions(newer) == 1


def test_beyond_the_last_step_nothing_is_compiled(make_job: MakeJob) -> None:
    with pytest.raises(UserError) as caught:
        train(make_job(), display(), profile=StepRange(5, 9))
    assert caught.value.code == "E-RUN-085"


def test_a_range_in_the_past_ends_only_a_run_without_supervisor() -> None:
    alone = silent_worker()
    assert still_ahead(StepRange(10, 15), 9, 20, alone, FailingReporter()) == StepRange(10, 15)
    with pytest.raises(UserError) as caught:
        still_ahead(StepRange(10, 15), 10, 20, alone, FailingReporter())
    assert caught.value.code == "E-RUN-086"
    warnings: list[str] = []
    assert still_ahead(StepRange(10, 15), 12, 20, replace(alone, attempt=1), RecordingReporter(warnings)) is None
    assert len(warnings) == 1


class FakeRecording(Recording):
    """Records what it is asked, and fails to start or to stop if `fails` says so."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        super().__init__(folder, on_cpu=True)
        self.fails, self.calls = fails, list[Any]()

    def start(self) -> None:
        if self.fails == "start":
            raise RuntimeError("another profile")
        self._is_active = True
        self.calls.append("start")

    def next_step(self, step: int | None) -> None:
        self.calls.append(step)

    def stop(self) -> Path:
        self._is_active = False
        if self.fails == "stop":
            raise OSError("no space")
        self.calls.append("stop")
        return self.folder


def played(recording: FakeRecording, steps: StepRange, last: int) -> tuple[list[Any], list[str]]:
    """The recorded ranges and the warnings of a run of `last` steps."""
    from contextlib import nullcontext

    saved: list[Any] = []
    warnings: list[str] = []
    hook = ProfileHook(
        steps,
        recording,
        on_saved=lambda *found: saved.append(found[0]),
        stopping=nullcontext,
        reporter=RecordingReporter(warnings),
    )
    state: Any = ()
    hook.on_start(0, state)
    for step in range(1, last + 1):
        if hook.is_due(step):
            hook.on_step(step, state)
        hook.after_step(step)
    hook.on_stop(last, state)
    return saved, warnings


def test_order_of_events(tmp_path: Path) -> None:
    recording = FakeRecording(tmp_path)
    assert played(recording, StepRange(3, 5), 8) == ([StepRange(3, 5)], [])
    assert recording.calls == ["start", 3, 4, 5, "stop"]


def test_a_run_that_stops_early_keeps_what_it_has(tmp_path: Path) -> None:
    saved, warnings = played(FakeRecording(tmp_path), StepRange(3, 9), 5)
    assert saved == [StepRange(3, 5)]
    assert len(warnings) == 1
    saved, warnings = played(FakeRecording(tmp_path), StepRange(7, 9), 5)
    assert saved == []
    assert len(warnings) == 1


@pytest.mark.parametrize("fails", ["start", "stop"])
def test_a_failing_profiler_does_not_end_the_run(tmp_path: Path, fails: str) -> None:
    saved, warnings = played(FakeRecording(tmp_path, fails), StepRange(2, 3), 4)
    assert saved == []
    assert len(warnings) == 1


def test_profile_command_leaves_no_run(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    recorded = profile(job, to=tmp_path / "out", reporter=display(), steps=2, warmup=1)
    assert not Path(job.runs).exists()
    [file] = (tmp_path / "out").rglob("*.xplane.pb")
    assert recorded_steps(file) == [2, 3]
    assert executions(file) == 2
    summary = recorded._summary
    assert summary is not None
    assert summary.busy_seconds + summary.idle_seconds == pytest.approx(summary.step_seconds)
    assert (tmp_path / "out" / "profile.txt").read_text() == recorded.text


@pytest.mark.parametrize(("text", "first", "last"), [("10:15", 10, 15), ("7", 7, 7), ("1:1", 1, 1)])
def test_range(text: str, first: int, last: int) -> None:
    assert range_of(text) == StepRange(first, last)
    assert range_of(text).count == last - first + 1


@pytest.mark.parametrize("text", ["15:10", "0:3", "a:b", "-3:4", "3:", ":3", "1:2:3", "2.5:3"])
def test_mistakes(text: str) -> None:
    with pytest.raises(UserError) as caught:
        range_of(text)
    assert caught.value.code == "E-RUN-084"


def test_a_reversed_range_suggests_the_other_order() -> None:
    with pytest.raises(UserError) as caught:
        range_of("15:10")
    assert caught.value.fix == "--profile 10:15"


def test_beyond_the_last_step() -> None:
    StepRange(3, 6).require_reached(6)
    with pytest.raises(UserError) as caught:
        StepRange(10, 15).require_reached(12)
    assert caught.value.code == "E-RUN-085"
    assert caught.value.fix == "--profile 7:12"
