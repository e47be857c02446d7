"""The default of checkpoint.every, by an exhaustive search over plan's own model of a run."""

from __future__ import annotations

import math

import pytest

from forerun.config.schema import Job
from forerun.hardware.slices import slice_named
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import CompileRequest
from forerun.planner.cost.job_cost import RunCost, Saves, Tariff, job_cost_of
from forerun.planner.cost.save_interval import aligned, best_interval, lost_share
from forerun.planner.memory import MemoryReport
from forerun.planner.report.plan_notes import save_notes
from forerun.planner.time.step_time import StepTime
from forerun.resolve.resolved_job import ResolvedJob
from forerun.units import GIB, Bytes, Seconds

TIMES = {"between_seconds": 4 * 3600}


def verdict_on(name: str, step_seconds: float = 0.47, **job: object) -> FitResult:
    """The state of a model with 3B parameters."""
    wanted = {"model": "llama3.2-3b", "data": "nothing", "batch": 32, "sequence": 2048, "steps": 100_000, **job}
    memory = MemoryReport(*(Bytes(n * GIB) for n in (8, 1, 2, 0, 0)))
    step = StepTime(step_seconds, {"matmul": step_seconds})
    question = CompileRequest(ResolvedJob(Job.model_validate(wanted)), slice_named(name))
    return FitResult(question, memory, True, Seconds(1), "x", "1x8x1", 1e15, 65536, {}, step, saved_bytes=37 * 10**9)


def billed_seconds(verdict: FitResult, every: int) -> float:
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert verdict.question.job.steps is not None
    steps = verdict.question.job.steps
    saves = Saves(every, math.ceil(steps / every), *list(vars(bill.saves).values())[2:])
    return RunCost(steps, saves).spot_seconds(0.47)


def test_auto_is_the_best_of_all_intervals() -> None:
    verdict = verdict_on("v6e-8")
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert bill.saves.every == bill.best_every
    assert bill.save_waste == 0
    best = min(billed_seconds(verdict, every) for every in range(10, 5000, 10))
    assert billed_seconds(verdict, bill.saves.every) < 1.01 * best
    assert str(bill.saves.every) in save_notes([(verdict, bill)])[0]


@pytest.mark.parametrize(("every", "warned"), [(100, True), (400, False), (600, False), (50_000, True)])
def test_a_number_that_wastes_time_is_warned_about(every: int, warned: bool) -> None:
    verdict = verdict_on("v6e-8", checkpoint={"every": every})
    bill = job_cost_of(verdict, Tariff())
    assert bill is not None
    assert bill.saves.every == every
    expected = max(0.0, billed_seconds(verdict, every) / billed_seconds(verdict, bill.best_every) - 1)
    assert bill.save_waste == pytest.approx(expected)
    assert (expected > 0.05) == warned
    notes = save_notes([(verdict, bill)])
    assert bool(notes) == warned
    assert all(f"checkpoint.every={bill.best_every}" in note for note in notes)


def test_a_short_run_saves_ten_times_if_that_is_cheap() -> None:
    assert best_interval(200, 0.3, pause_seconds=0.02, write_seconds=0.1, **TIMES) == 20
    assert best_interval(200, 0.3, pause_seconds=1, write_seconds=1, **TIMES) == 200, "ten saves would cost a sixth"
    assert best_interval(200, 0.3, pause_seconds=0.02, write_seconds=30, **TIMES) == 100
    assert best_interval(10**6, 1.0, pause_seconds=2, write_seconds=1, **TIMES) == 240
    assert best_interval(5, 1e-6, pause_seconds=0.0, write_seconds=0.0, **TIMES) >= 1


def test_lost_time_by_hand() -> None:
    lost = lost_share(100, 0.5, pause_seconds=2, write_seconds=60, **TIMES)
    assert lost == pytest.approx((2 + 10) / 50 + 50 / (2 * 14400))


@pytest.mark.parametrize(
    ("validation", "keep_best", "share", "expected"),
    [({"every": 150}, 1, 0.1, 450), ({}, 1, 0.1, 400), ({"every": 150}, 0, 0.1, 386), ({"every": 150}, 1, 0.0, 386)],
)
def test_the_best_checkpoints_are_saved_with_an_evaluation(
    validation: dict[str, int], keep_best: int, share: float, expected: int
) -> None:
    fields = {"validation": validation, "checkpoint": {"keep_best": keep_best}}
    job = Job.model_validate({"model": "llama3.2-3b", "data": {"path": "x", "validation": share}, **fields})
    assert aligned(job, 386) == expected
