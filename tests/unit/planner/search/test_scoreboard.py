"""The progress of a search: counts, the compiles that are left, and the best plan so far."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from forerun.config.schema import Job
from forerun.planner.search.scoreboard import Scoreboard
from forerun.planner.search.space import Bounds, Candidate, space_of
from forerun.planner.search.strategy import LOOK_AHEAD
from forerun.resolve.resolved_job import ResolvedJob

BEST = "v6e-4 1x4x1 micro-batch 2, remat dots: 1.00 s a step, 2.00 h, $12"


@pytest.fixture
def candidates() -> tuple[Candidate, ...]:
    job = Job.model_validate({"model": "llama3.2-1b", "data": "text", "batch": 8, "steps": 10})
    return space_of(ResolvedJob(job), "v6e-4", Bounds(lambda one: 1.0)).candidates


@pytest.mark.parametrize("columns", [80, 120])
def test_counts_and_clock_fit_on_a_line_each(columns: int, candidates: tuple[Candidate, ...]) -> None:
    board = Scoreboard(3258, 104, stream=io.StringIO())
    for one in candidates[:3]:
        board.started(one)
    board.finished(candidates[0], "1 s a step", BEST, LOOK_AHEAD, 2)
    console = Console(file=io.StringIO(), width=columns, record=True)
    console.print(board.screen())
    counts, clock, *rest = console.export_text().splitlines()
    assert [part.strip() for part in counts.split("·")] == [
        "3258 candidates", "104 from the cache", "1 compiled", f"at least {LOOK_AHEAD} more",
    ]  # fmt: skip
    assert "so far" in clock
    assert "ETA" in clock
    assert all(str(one) in rest[n] for n, one in enumerate(candidates[1:3]))
    assert "best so far" in rest[2]


def test_a_line_per_result_without_a_terminal(candidates: tuple[Candidate, ...]) -> None:
    stream = io.StringIO()
    with Scoreboard(12, 0, stream=stream) as board:
        board.started(candidates[0])
        board.finished(candidates[0], "1 s a step", BEST, 3, 2)
    assert stream.getvalue().startswith("[1, about 3 more")
    assert f"] {candidates[0]}: 1 s a step after" in stream.getvalue()


def test_the_time_left_is_that_of_the_expected_compiles(candidates: tuple[Candidate, ...]) -> None:
    board = Scoreboard(12, 0, stream=io.StringIO())
    assert board.eta_seconds() is None
    board._seconds = [4.0, 8.0]
    board._open, board._workers = 6, 2
    assert board.eta_seconds() == 18.0
