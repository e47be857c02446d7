"""What a search found, in the order of the goal, with the front of time and money."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.plan.candidates import Candidate
from forerun.plan.money import Tariff, bill_of
from forerun.plan.strategy import Goal, Standing
from forerun.plan.verdict import Verdict


@dataclass(frozen=True)
class Found:
    """A candidate that fits, with its hours and USD on demand for the whole job."""

    candidate: Candidate
    verdict: Verdict
    hours: float
    usd: float | None
    within: bool  # the user's limits
    on_front: bool = False

    @property
    def step_seconds(self) -> float:
        assert self.verdict.step is not None
        return self.verdict.step.mid_seconds

    @property
    def standing(self) -> Standing:
        return Standing(self.hours, self.usd)


def ranked(
    verdicts: Mapping[Candidate, Verdict], goal: Goal, tariff: Tariff, max_hours: float | None = None
) -> list[Found]:
    """The goal's winner first; what breaks a limit comes last. Equal to four digits: the shorter step."""
    found = [_found(one, verdict, tariff, max_hours) for one, verdict in verdicts.items() if verdict.step]
    marked = [
        Found(**{**vars(one), "on_front": not any(other.standing.beats(one.standing) for other in found)})
        for one in found
    ]

    def order(one: Found) -> tuple[bool, float, float, str]:
        return not one.within, float(f"{one.standing.score(goal):.4g}"), one.step_seconds, str(one.candidate)

    return sorted(marked, key=order)


def _found(one: Candidate, verdict: Verdict, tariff: Tariff, max_hours: float | None) -> Found:
    bill = bill_of(verdict, tariff)
    assert bill is not None
    usd = bill.on_demand.usd.mid if bill.on_demand else None
    cheap = tariff.max_usd is None or (usd is not None and usd <= tariff.max_usd)
    return Found(one, verdict, bill.hours.mid, usd, cheap and (max_hours is None or bill.hours.mid <= max_hours))


def equal_slices(found: Sequence[Found], goal: Goal) -> list[str]:
    """Return the slices whose best plan is as good as the winner within the error of the times.

    Plans of one slice are not compared: the error of their times is nearly the same.
    """
    best: dict[str, Found] = {}
    for one in found:
        if one.within:
            best.setdefault(one.candidate.slice.name, one)
    if not best:
        return []
    winner, *others = best.values()
    least = winner.standing.score(goal)
    power = 2 if goal == "balanced" else 1  # the error counts in hours and in dollars
    names = []
    for one in others:
        assert one.verdict.step is not None
        low = one.verdict.step.low_seconds / one.verdict.step.mid_seconds
        if one.standing.score(goal) * low**power <= least < math.inf:
            names.append(one.candidate.slice.name)
    return names


def shown(found: Sequence[Found], most: int) -> list[Found]:
    """The best of the ranking, with the whole front among them."""
    kept = set(range(min(most, len(found)))) | {n for n, one in enumerate(found) if one.on_front}
    return [found[n] for n in sorted(kept)]
