from __future__ import annotations

from pathlib import Path

import pytest
from fit_results import fit_result, request

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff
from forerun.planner.search.ranking import in_order, order_note
from forerun.planner.search.strategy import Goal

# Rows in the order of the goal, and slices that the error of the times does not tell apart.

# One dollar per chip-hour everywhere, so that 1000 h on one chip cost $1,000.
PRICES = "generation,zone,usd_per_chip_hour_on_demand,usd_per_chip_hour_spot,date,source\n" + "".join(
    f"{name},us-central1-b,1.0,0.5,2026-11-01,test\n" for name in ("v5e", "v6e")
)
HOURS = {"v5e-1": 1000.0, "v5e-4": 400.0, "v6e-8": 150.0, "v6e-1": 500.0}  # $1000, $1600, $1200, $500
STEPS = 3600


@pytest.fixture
def tariff(tmp_path: Path) -> Tariff:
    file = tmp_path / "prices.csv"
    file.write_text(PRICES, "utf-8")
    return Tariff(prices_file=str(file))


def verdict(name: str, hours: float | None) -> FitResult:
    """Return a result with as many seconds a step as hours of the job."""
    question = request(name, batch=8, steps=STEPS, checkpoint={"every": STEPS})
    return fit_result(question, hours, (8 if hours else 500, 1, 2))


def names(goal: Goal, tariff: Tariff) -> list[str]:
    verdicts = [verdict("v4-8", None), *(verdict(name, hours) for name, hours in HOURS.items())]
    return [v.question.slice.name for v in in_order(verdicts, goal, tariff)]


def test_the_goal_decides_and_what_does_not_fit_is_last(tariff: Tariff) -> None:
    assert names("fastest", tariff) == ["v6e-8", "v5e-4", "v6e-1", "v5e-1", "v4-8"]
    assert names("cheapest", tariff) == ["v6e-1", "v5e-1", "v6e-8", "v5e-4", "v4-8"]
    assert names("balanced", tariff) == ["v6e-8", "v6e-1", "v5e-4", "v5e-1", "v4-8"]


def test_slices_over_the_budget_come_after_the_others(tariff: Tariff) -> None:
    limited = Tariff(prices_file=tariff.prices_file, max_usd=650)  # spot costs about half
    assert names("fastest", limited)[0] == "v6e-1"


def test_slices_that_the_error_does_not_tell_apart_are_named(tariff: Tariff) -> None:
    """The range is 0.75 to 1.25: 110 h may be 83 h, less than 100 h; 150 h are 113 h at least."""
    ordered = in_order([verdict("v5e-1", 100), verdict("v6e-1", 110), verdict("v5e-4", 150)], "fastest", tariff)
    note = order_note(ordered, "fastest", tariff)
    assert "the times: v6e-1." in note
    assert "v5e-4" not in note
    assert "Equal" not in order_note([ordered[0], ordered[2]], "fastest", tariff)
    assert order_note(ordered[:1], "fastest", tariff) == ""
