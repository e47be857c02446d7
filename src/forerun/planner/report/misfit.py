"""Errors for a job that fits no slice or GPU machine, or none within the budget."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UserError
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.job_cost import Tariff, job_cost_of
from forerun.planner.report.formatting import gib_text, places_text
from forerun.planner.report.plan_notes import place_text
from forerun.planner.report.remedies import Tried
from forerun.units import Bytes, Usd


def over_budget(verdicts: Sequence[FitResult], tariff: Tariff) -> UserError | None:
    """Return an error if the job fits some slices but all of them exceed the budget, else None."""
    assert tariff.max_usd is not None
    bills = [(v, bill) for v in verdicts if (bill := job_cost_of(v, tariff))]
    if not bills or any(bill.within(tariff.max_usd) for _, bill in bills):
        return None
    offers = [
        (offer.usd.mid, v.question.slice.name, way, place_text(offer))
        for v, bill in bills
        for way, offer in (("on demand", bill.on_demand), ("spot", bill.spot))
        if offer
    ]
    holding = [v.question.slice for v, _ in bills]
    kinds = places_text(holding, one=True)
    limit = f"${tariff.max_usd:g}"  # the user's figure, not a prediction
    if not offers:
        return UserError(
            "E-PLAN-015",
            f"no {kinds} is known to stay below {limit}",
            why=f"no price is known for the {places_text(holding)} that hold the job",
            fix="give your own prices: --prices FILE (columns: forerun hardware prices)",
        )
    usd, name, way, zone = min(offers)
    return UserError(
        "E-PLAN-016",
        f"no {kinds} that holds the job stays below {limit}",
        why=f"the cheapest is {name} {way} in {zone} for {Usd(usd)}",
        fix=f"allow --max-usd {max(1, round(usd * 1.05 + 0.5))}, or train for fewer steps",
    )


def nearest(verdicts: Sequence[FitResult]) -> FitResult:
    """Return the result of the slice that lacks the smallest share of its memory."""
    return max(verdicts, key=lambda v: v.spare_bytes / v.limit_bytes)


def does_not_fit(verdicts: Sequence[FitResult], tried: Sequence[Tried] = ()) -> UserError:
    """Return the error for a job that fits none of the slices.

    Args:
        verdicts: The results of all slices.
        tried: Changes that were compiled for the nearest slice, as suggestions.
    """
    near = nearest(verdicts)
    places = places_text(v.question.slice for v in verdicts)
    larger = "a machine with more GPUs" if near.question.slice.platform == "gpu" else "a slice with more chips"
    name, memory = near.question.slice.name, near.memory
    resting = Bytes(memory.weights_bytes + memory.optimizer_bytes)
    why = f"{name} needs {gib_text(memory.peak_bytes)} GiB per device and has {gib_text(near.limit_bytes)} GiB: "
    why += f"{Bytes(-near.spare_bytes)} short"
    if resting > near.limit_bytes:
        why += f"; weights and optimizer alone are {resting}"
    return UserError(
        "E-PLAN-017",
        f"the job does not fit {name}"
        if len(verdicts) == 1
        else f"the job fits none of these {len(verdicts)} {places}",
        why=why,
        fix="\n".join([*_remedy_lines(tried, name), f"{larger} or memory: forerun hardware slices"]),
    )


def _remedy_lines(tried: Sequence[Tried], name: str) -> list[str]:
    """Return the lines of the fix that list the compiled changes."""
    if not tried:
        return []
    quickest = next((one.verdict.step.mid_seconds for one in tried if one.verdict.step), None)
    lines = [f"- {one.told(quickest)}" for one in tried]
    return [f"one of these, each compiled for {name} with the batch unchanged:", *lines, "or"]
