"""Goodput of runs whose hosts fail, against simulated failures and published figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from fit_results import fit_result, request

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.failures import (
    DAY_SECONDS,
    FailureEstimate,
    Recovery,
    failures_of,
    fewer_slices_goodput,
    goodput,
)
from forerun.planner.cost.job_cost import ASSUMPTIONS, saves_of
from forerun.planner.report.plan_json import as_json
from forerun.planner.report.plan_notes import failure_notes


def verdict_on(name: str, seconds: float | None = 2.0, **job: object) -> FitResult:
    return fit_result(request(name, **{"batch": 1024, "steps": 1000, **job}), seconds)


class Clock:
    """Simulated hosts: the time, and the next failure of each slice. A failed slice returns after `replace` seconds."""

    def __init__(self, slices: int, between: float, replace_seconds: float, seed: int) -> None:
        self._dice, self._mean, self._replace = random.Random(seed), between * slices, replace_seconds
        self.now = 0.0
        self.fails = [self._life() for _ in range(slices)]
        self.returns: dict[int, float] = {}

    def _life(self) -> float:
        return self.now + self._dice.expovariate(1 / self._mean)

    def until(self, moment: float) -> str:
        """Advance to `moment`, or to the first failure or return before it. Return which one it was."""
        running = ((when, number) for number, when in enumerate(self.fails) if number not in self.returns)
        first = min(running, default=(math.inf, -1))
        back = min(((when, number) for number, when in self.returns.items()), default=(math.inf, -1))
        if moment <= min(first[0], back[0]):
            self.now = moment
            return "moment"
        if first[0] < back[0]:
            self.now = first[0]
            self.returns[first[1]] = self.now + self._replace
            return "failure"
        self.now = back[0]
        del self.returns[back[1]]
        self.fails[back[1]] = self._life()
        return "return"


def simulated(
    slices: int,
    least: int,
    interval: float,
    stall: float,
    write: float,
    recovery: Recovery,
    between: float,
    days: float,
) -> float:
    """Return the goodput of one long run, step by step: useful seconds at the speed of all slices / all seconds."""
    clock = Clock(slices, between, recovery.replace, seed=7)
    end, kept = days * between, 0.0
    while clock.now < end:
        kept += attempt(clock, slices, least, interval, stall, write, recovery)
        settle(clock, slices, least, recovery)
    return kept / clock.now


def settle(clock: Clock, slices: int, least: int, recovery: Recovery) -> None:
    """Pass the time until the run has restarted. Each failure starts the restart again."""
    restart = clock.now + (recovery.wait if clock.returns and least < slices else 0.0) + recovery.resume
    while True:
        missing = clock.returns
        if missing and (0 in missing or slices - len(missing) < least):
            clock.until(math.inf)
            restart = clock.now + recovery.resume
        elif (event := clock.until(restart)) == "moment":
            return
        elif event == "failure":
            restart = clock.now + (recovery.wait if least < slices else 0.0) + recovery.resume


def attempt(
    clock: Clock, slices: int, least: int, interval: float, stall: float, write: float, recovery: Recovery
) -> float:
    """Return the useful seconds of one attempt: of its steps before the last complete save."""
    speed = (slices - len(clock.returns)) / slices
    began = clock.now
    event = clock.until(math.inf)
    passed = clock.now - began
    if event == "failure":
        return speed * interval * sum(1 for k in range(1, int(passed / (interval + stall)) + 1)
                                      if k * (interval + stall) + write <= passed)  # fmt: skip
    saves = int(passed / (interval + stall))
    clock.now += stall + write  # the run saves and stops, to return with more slices
    return speed * (passed - saves * stall)


@pytest.mark.parametrize(
    ("interval", "stall", "write", "resume", "between"),
    [(100, 1, 5, 30, 10_000), (100, 5, 60, 300, 2000), (30, 2, 25, 1000, 3000), (400, 20, 10, 50, 500)],
)
def test_goodput_is_that_of_simulated_failures(
    interval: float, stall: float, write: float, resume: float, between: float
) -> None:
    found = goodput(interval, stall, write, resume, between)
    recovery = Recovery(replace=0.0, wait=0.0, resume=resume)
    assert found == pytest.approx(simulated(1, 1, interval, stall, write, recovery, between, 20_000), rel=0.01)


def test_goodput_without_failures_is_the_share_without_saves() -> None:
    assert goodput(99.0, 1.0, 0.0, 0.0, 1e15) == pytest.approx(0.99)
    assert goodput(99.0, 1.0, 0.0, 1e9, 1e3) == 0.0


@pytest.mark.parametrize(
    ("slices", "least", "replaced", "between"),
    [(4, 3, 3600, 40_000), (16, 14, 7200, 20_000), (2, 1, 86_400, 500_000), (4, 3, 900, 10_000)],
)
def test_fewer_slices_are_near_simulated_failures(slices: int, least: int, replaced: float, between: float) -> None:
    recovery = Recovery(replace=replaced, wait=60.0, resume=150.0)
    found = fewer_slices_goodput(slices, least, 300.0, 2.0, 5.0, recovery, between)
    assert found == pytest.approx(simulated(slices, least, 300.0, 2.0, 5.0, recovery, between, 4_000), abs=0.015)
    waiting = goodput(300.0, 2.0, 5.0, recovery.with_all, between)
    assert waiting == pytest.approx(simulated(slices, slices, 300.0, 2.0, 5.0, recovery, between, 4_000), abs=0.015)


def test_a_slice_that_returns_soon_is_waited_for() -> None:
    recovery = Recovery(replace=100.0, wait=60.0, resume=50.0)
    waiting = goodput(300.0, 2.0, 5.0, recovery.with_all, 40_000.0)
    assert fewer_slices_goodput(4, 3, 300.0, 2.0, 5.0, recovery, 40_000.0) == waiting


def estimate(name: str, **job: object) -> tuple[FitResult, FailureEstimate]:
    verdict = verdict_on(name, **job)
    found = failures_of(verdict)
    assert found is not None
    return verdict, found


def test_hosts_of_published_failure_rates() -> None:
    """64 hosts of four v5e chips each, and the interruptions that Meta counted in 54 days of 16,384 GPUs."""
    _, found = estimate("v5e-256")
    assert (found.hosts, found.between_seconds) == (64, 1250 * 86_400 / 64)
    _, several = estimate("16xv5e-256", batch=4096)
    assert (several.hosts, several.between_seconds) == (1024, found.between_seconds / 16)
    _, gpus = estimate("h100-8")
    assert gpus.hosts == 8
    assert pytest.approx(gpus.between_seconds * 8 / 16_384, rel=1e-3) == 54 * DAY_SECONDS / 419


def test_the_best_interval_has_the_highest_goodput() -> None:
    verdict, found = estimate("16xv5e-256", batch=4096, checkpoint={"every": 3})
    saves = saves_of(verdict)
    assert found.recovery_seconds == pytest.approx(
        ASSUMPTIONS.replace_seconds
        + ASSUMPTIONS.restart_seconds
        + ASSUMPTIONS.compile_seconds
        + saves.write_seconds
    )  # fmt: skip
    around = [
        goodput(
            n * 2.0, saves.stall_seconds(n * 2.0), saves.write_seconds, found.recovery_seconds, found.between_seconds
        )
        for n in (found.every // 2, found.every, found.every * 2)
    ]
    assert max(around) == around[1] == pytest.approx(found.goodput)
    assert found.planned_goodput < found.goodput


def test_min_slices_raise_the_goodput_if_another_host_takes_hours() -> None:
    job = {"batch": 3072, "mesh": {"slices": 4, "min_slices": 3}}
    verdict, found = estimate("4xv5e-256", **job)
    assert found.fewer_slices_goodput is not None
    slow = failures_of(verdict, replace(ASSUMPTIONS, replace_seconds=6 * 3600.0))
    assert slow is not None
    assert slow.fewer_slices_goodput is not None
    assert slow.fewer_slices_goodput > slow.goodput + 0.02
    assert estimate("4xv5e-256", batch=3072)[1].fewer_slices_goodput is None


def test_the_plan_reports_failures_of_large_runs() -> None:
    (note,) = failure_notes([verdict_on("v5e-8"), verdict_on("v5e-256")])
    assert "v5e-256" in note
    [row] = as_json([verdict_on("v5e-256")])["slices"]
    assert row["failures"]["hosts"] == 64
    assert 0.9 < row["failures"]["goodput"] < 1
    assert failures_of(verdict_on("v5e-8", seconds=None)) is None
