"""The order of a plan's rows by the goal, and a note on slices that are equal within the error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import JobCost, Tariff, job_cost_of
from forerun.planner.search.strategy import Goal, TimeAndCost

MEANING: dict[Goal, str] = {
    "cheapest": "dollars on demand",
    "fastest": "hours",
    "balanced": "hours x dollars on demand",
}


def in_order(verdicts: Sequence[FitResult], goal: Goal, tariff: Tariff) -> list[FitResult]:
    """Return the results sorted by the goal. Slices over --max-usd come later, and those that do not fit come last."""

    def key(v: FitResult) -> tuple[bool, bool, float, float, str]:
        bill = job_cost_of(v, tariff)
        if bill is None:
            return True, False, -v.spare_bytes / v.limit_bytes, 0.0, v.question.slice.name
        return False, not bill.within(tariff.max_usd), score(bill, goal), bill.hours.mid, v.question.slice.name

    return sorted(verdicts, key=key)


def score(bill: JobCost, goal: Goal, end: str = "mid") -> float:
    """Return the value that the goal minimises, or infinity if it needs a price and none is known.

    `end` selects the end of the ranges: low, mid or high.
    """
    usd = getattr(bill.on_demand.usd, end) if bill.on_demand else None
    return TimeAndCost(getattr(bill.hours, end), usd).score(goal)


def order_note(ordered: Sequence[FitResult], goal: Goal, tariff: Tariff) -> str:
    """Return a note: what the rows are ordered by, and which slices equal the first within the error of the times.

    The note is empty if fewer than two slices fit.
    """
    fitting = [(v, bill) for v in ordered if (bill := job_cost_of(v, tariff))]
    if len(fitting) < 2:
        return ""
    text = f"Ordered by {MEANING[goal]} (--goal {goal})."
    best, best_bill = fitting[0]
    least = score(best_bill, goal)
    if not math.isfinite(least):
        return text
    equal = [v.question.slice.name for v, bill in fitting[1:] if score(bill, goal, "low") <= least]
    if equal:
        text += f" Equal to {best.question.slice.name} within the error of the times: {', '.join(equal)}."
    return text
