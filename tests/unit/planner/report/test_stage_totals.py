"""Sums of the plans of several stages. Expected values are computed by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from error_assertions import assert_error

from forerun.console import SafeConsole
from forerun.planner.report.stage_totals import cheapest_choice, over_stages_budget, print_totals, totals_of


def row(name: str, hours: float | None, on_demand: float | None, spot: float | None) -> dict[str, Any]:
    cost = {"on_demand": on_demand, "spot": spot}
    return {"slice": name, "fits": hours is not None, "hours": hours, "cost_usd": cost}


ROWS = {
    "qat": [row("v6e-1", 2.0, 5.0, 0.5), row("v5e-8", 1.0, 9.0, 1.5), row("v4-8", 1.0, 3.0, 1.0)],
    "dpo": [row("v5e-8", 0.5, 4.0, 0.75), row("v6e-1", None, None, None)],
}


def test_sums_are_for_slices_of_all_stages() -> None:
    whole, short = totals_of(ROWS)
    assert whole.as_dict() == {
        "slice": "v5e-8",
        "fits": True,
        "misfits": [],
        "hours": 1.5,
        "cost_usd": {"on_demand": 13.0, "spot": 2.25},
    }
    assert (short.slice, short.fits, short.misfits, short.hours, short.on_demand_usd) == (
        "v6e-1",
        False,
        ("dpo",),
        None,
        None,
    )


def test_each_stage_may_have_its_own_slice() -> None:
    assert cheapest_choice(ROWS) == (1.25, {"qat": "v6e-1 spot", "dpo": "v5e-8 spot"})
    assert cheapest_choice({"dpo": [row("v6e-1", None, None, None)]}) is None


def test_the_budget_is_for_all_stages() -> None:
    assert over_stages_budget(ROWS, 1.25) is None
    error = over_stages_budget(ROWS, 1.2)
    assert error is not None
    assert_error(error, "E-COMMAND-041", why="qat on v6e-1 spot, dpo on v5e-8 spot")


@pytest.mark.parametrize("budget", [None, 1.0])
def test_the_table_names_the_stages_that_do_not_fit(budget: float | None) -> None:
    stream = io.StringIO()
    print_totals(SafeConsole(file=stream, width=100), ROWS, budget)
    text = stream.getvalue()
    assert "not dpo" in text
    assert "all stages" in text
    assert ("over the budget" in text) == (budget is not None)
