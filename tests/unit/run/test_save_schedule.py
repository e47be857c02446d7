"""At which steps a run saves, with times that are given and not measured."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from recording_reporter import RecordingReporter

from forerun.checkpoint.reader import Reader
from forerun.config.schema import Job
from forerun.reporter import LineReporter
from forerun.resolve.resolved_job import ResolvedJob
from forerun.run import checkpoint_hook
from forerun.run import train as loop
from forerun.run.checkpoint_hook import SaveSchedule, from_first, rounded

MakeJob = Callable[..., Job]
GB = jax.ShapeDtypeStruct((250_000_000,), jnp.float32)


def made(job: Job, last: int, told: list[str] | None = None, first: int = 0, arrays: int = 1) -> SaveSchedule:
    state = [GB] * arrays
    program: Any = SimpleNamespace(state=state, saved=lambda state: state)
    return SaveSchedule(ResolvedJob(job), program, first, last, RecordingReporter(told))


def saved_at(
    one: SaveSchedule, clock: Any, *, last: int, first: int = 0, step: float, pause: float = 1.0, write: float = 2.0
) -> list[int]:
    """The steps at which a run with these times saves."""
    found: list[int] = []
    for number in range(first + 1, last + 1):
        if one.is_due(number):
            with one.measure(number, lambda: write if found else None):
                clock.now += pause
            found.append(number)
        one.update(number, [9.0] + [step] * (number - first))
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(checkpoint_hook.time, "perf_counter", lambda: clock.now)
    return clock


def test_a_number_is_kept_to(make_job: MakeJob, clock: Any) -> None:
    job = make_job("checkpoint.every=4")
    assert saved_at(made(job, 10), clock, last=10, step=1.0) == [4, 8, 10]
    assert saved_at(made(job, 10, first=3), clock, first=3, last=10, step=1.0) == [4, 8, 10]


def test_auto_follows_from_the_times(make_job: MakeJob, clock: Any) -> None:
    """A pause of 1 s and a failure every 4 h: 170 s between saves, by Young and Daly."""
    told: list[str] = []
    job = make_job("checkpoint.every=auto")
    found = saved_at(made(job, 5000, told), clock, last=5000, step=1.0)
    assert found[:3] == [170, 340, 510]
    assert found[-1] == 5000
    assert len(told) == 1
    assert "170 steps" in told[0]
    assert saved_at(made(job, 5000), clock, last=5000, step=100.0)[:3] == [6, 8, 10], "170 s are less than two steps"


def test_auto_learns_from_the_first_saves(make_job: MakeJob, clock: Any) -> None:
    """A disk that takes ten minutes instead of two seconds: no save waits for the one before."""
    told: list[str] = []
    job = make_job("checkpoint.every=auto")
    found = saved_at(made(job, 20_000, told), clock, last=20_000, step=1.0, pause=1.0, write=601.0)
    assert found[:4] == [170, 340, 940, 1540]
    assert len(told) == 2


def test_auto_keeps_what_keep_every_names(make_job: MakeJob, clock: Any) -> None:
    job = make_job("checkpoint.every=auto", "checkpoint.keep_every=100")
    assert saved_at(made(job, 400), clock, last=400, step=0.001) == [100, 200, 300, 400]


def test_auto_saves_with_evaluations_if_the_best_are_kept(make_job: MakeJob, clock: Any) -> None:
    job = make_job("checkpoint.every=auto", "checkpoint.keep_best=1", "data.validation=0.3", "validation.every=50")
    assert saved_at(made(job, 2000), clock, last=2000, step=1.0)[:2] == [200, 400]


def test_a_short_run_saves_its_last_step(make_job: MakeJob, clock: Any) -> None:
    job = make_job("checkpoint.every=auto")
    assert saved_at(made(job, 4), clock, last=4, step=1.0) == [4]
    assert saved_at(made(job, 100), clock, last=100, step=0.1) == [100]


def test_a_number_that_wastes_time_is_warned_about_once(make_job: MakeJob, clock: Any) -> None:
    told: list[str] = []
    saved_at(made(make_job("checkpoint.every=10"), 3000, told), clock, last=3000, step=1.0, pause=2.0, write=30.0)
    assert len(told) == 1
    assert "checkpoint.every=10" in told[0]
    told.clear()
    saved_at(made(make_job("checkpoint.every=200"), 3000, told), clock, last=3000, step=1.0, pause=2.0, write=30.0)
    saved_at(made(make_job("checkpoint.every=2"), 20, told), clock, last=20, step=0.01, pause=0.05, write=0.1)
    assert told == []


def test_two_digits() -> None:
    assert [rounded(n) for n in (1, 9, 10, 99, 386, 1449, 99_700)] == [1, 9, 10, 99, 390, 1400, 100_000]


def test_the_first_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    known: dict[str, str] = {}
    client = SimpleNamespace(key_value_set=known.__setitem__, blocking_key_value_get=lambda key, timeout: known[key])
    monkeypatch.setattr(distributed.global_state, "client", client)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert from_first("a", 7) == 7
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert from_first("a", 9) == 7


def test_a_run_with_auto_saves_and_resumes(make_job: MakeJob) -> None:
    """Whenever it saves, it compiles nothing between steps, and the last step is there."""
    job = make_job("checkpoint.every=auto", "steps=20")
    lines = io.StringIO()
    assert loop.train(job, LineReporter(lines, clock=time.monotonic)) is not None
    assert Reader(Path(job.runs) / "tiny" / "checkpoints").newest() == 20
    assert lines.getvalue().count("checkpoint ") >= 1
