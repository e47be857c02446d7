"""The order of the rows of a plan: by the goal, with the slices that are equal within the error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.plan.money import Bill, Tariff, bill_of
from forerun.plan.strategy import Goal, Standing
from forerun.plan.verdict import Verdict

MEANING: dict[Goal, str] = {
    "cheapest": "dollars on demand",
    "fastest": "hours",
    "balanced": "hours x dollars on demand",
}


def in_order(verdicts: Sequence[Verdict], goal: Goal, tariff: Tariff) -> list[Verdict]:
    """Sort by the goal. Slices over --max-usd come after the others, and those that do not fit come last."""

    def key(v: Verdict) -> tuple[bool, bool, float, float, str]:
        bill = bill_of(v, tariff)
        if bill is None:
            return True, False, -v.spare_bytes / v.limit_bytes, 0.0, v.question.slice.name
        return False, not bill.within(tariff.max_usd), score(bill, goal), bill.hours.mid, v.question.slice.name

    return sorted(verdicts, key=key)


def score(bill: Bill, goal: Goal, end: str = "mid") -> float:
    """Return what the goal minimises; infinite without a price. `end` of the range: low, mid or high."""
    usd = getattr(bill.on_demand.usd, end) if bill.on_demand else None
    return Standing(getattr(bill.hours, end), usd).score(goal)


def order_note(ordered: Sequence[Verdict], goal: Goal, tariff: Tariff) -> str:
    """Say what the rows are ordered by, and which slices are as good as the first within the error of the times."""
    fitting = [(v, bill) for v in ordered if (bill := bill_of(v, tariff))]
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
