"""The ranking of a search's plans by the goal, with the Pareto front of time and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import JobCost, Tariff, job_cost_of
from forerun.planner.search.space import Candidate
from forerun.planner.search.strategy import Goal, TimeAndCost


@dataclass(frozen=True)
class RankedPlan:
    """A candidate that fits. Hours and USD are on demand, for the complete job."""

    candidate: Candidate
    verdict: FitResult
    hours: float
    usd: float | None  # None: no price is known
    within: bool  # whether it is within the user's limits
    on_front: bool = False  # whether no other plan beats it in both time and cost
    provider: str | None = None  # of the price

    @property
    def step_seconds(self) -> float:
        assert self.verdict.step is not None
        return self.verdict.step.mid_seconds

    @property
    def standing(self) -> TimeAndCost:
        return TimeAndCost(self.hours, self.usd)


def ranked(
    verdicts: Mapping[Candidate, FitResult], goal: Goal, tariff: Tariff, max_hours: float | None = None
) -> list[RankedPlan]:
    """Return the plans that fit, best first. Plans beyond a limit come last.

    Plans whose scores agree to four digits are ordered by step time.
    """
    found = [_found(one, verdict, tariff, max_hours) for one, verdict in verdicts.items() if verdict.step]
    marked = [
        RankedPlan(**{**vars(one), "on_front": not any(other.standing.beats(one.standing) for other in found)})
        for one in found
    ]

    def order(one: RankedPlan) -> tuple[bool, float, float, str]:
        return not one.within, float(f"{one.standing.score(goal):.4g}"), one.step_seconds, str(one.candidate)

    return sorted(marked, key=order)


def _found(one: Candidate, verdict: FitResult, tariff: Tariff, max_hours: float | None) -> RankedPlan:
    bill = job_cost_of(verdict, tariff)
    assert bill is not None
    usd = bill.on_demand.usd.mid if bill.on_demand else None
    cheap = tariff.max_usd is None or (usd is not None and usd <= tariff.max_usd)
    within = cheap and (max_hours is None or bill.hours.mid <= max_hours)
    provider = bill.on_demand.price.provider if bill.on_demand else None
    return RankedPlan(one, verdict, bill.hours.mid, usd, within, provider=provider)


def equal_slices(found: Sequence[RankedPlan], goal: Goal) -> list[str]:
    """Return the slices whose best plan is as good as the winner within the error of the times.

    Plans of one slice are not compared: the error of their times is nearly the same.
    """
    best: dict[str, RankedPlan] = {}
    for one in found:
        if one.within:
            best.setdefault(one.candidate.slice.name, one)
    if not best:
        return []
    winner, *others = best.values()
    least = winner.standing.score(goal)
    power = 2 if goal == "balanced" else 1  # the score is hours x dollars, and the error affects both
    names = []
    for one in others:
        assert one.verdict.step is not None
        low = one.verdict.step.low_seconds / one.verdict.step.mid_seconds
        if one.standing.score(goal) * low**power <= least < math.inf:
            names.append(one.candidate.slice.name)
    return names


def shown(found: Sequence[RankedPlan], most: int) -> list[RankedPlan]:
    """Return the `most` best plans of the ranking, and all others on the Pareto front."""
    kept = set(range(min(most, len(found)))) | {n for n, one in enumerate(found) if one.on_front}
    return [found[n] for n in sorted(kept)]


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
            return True, False, -v.spare_bytes / v.limit_bytes, 0.0, v.slice_name
        return False, not bill.within(tariff.max_usd), score(bill, goal), bill.hours.mid, v.slice_name

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
    equal = [v.slice_name for v, bill in fitting[1:] if score(bill, goal, "low") <= least]
    if equal:
        text += f" Equal to {best.slice_name} within the error of the times: {', '.join(equal)}."
    return text
