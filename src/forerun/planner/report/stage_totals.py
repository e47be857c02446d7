"""Sums of the plans of several stages: hours and dollars for each slice that all plans contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.errors import UserError
from forerun.planner.report.formatting import hours_text, usd_text
from forerun.units import Usd

StageRows = Mapping[str, Sequence[Mapping[str, Any]]]  # by stage: the rows of its plan, as in `plan --json`
WAYS = ("on_demand", "spot")


@dataclass(frozen=True)
class StageTotal:
    """The sums of all stages on one slice. Hours and dollars are None if a stage does not fit, or without a price.

    Attributes:
      slice: the slice.
      misfits: the stages that do not fit it.
      hours: the hours of all stages.
      on_demand_usd: the cost on demand.
      spot_usd: the cost on spot.
    """

    slice: str
    misfits: tuple[str, ...]
    hours: float | None
    on_demand_usd: float | None
    spot_usd: float | None

    @property
    def fits(self) -> bool:
        """Whether all stages fit the slice."""
        return not self.misfits

    def as_dict(self) -> dict[str, Any]:
        """Return the sums with the keys of a row of `plan --json`."""
        return {
            "slice": self.slice,
            "fits": self.fits,
            "misfits": list(self.misfits),
            "hours": self.hours,
            "cost_usd": {"on_demand": self.on_demand_usd, "spot": self.spot_usd},
        }


def totals_of(rows: StageRows) -> list[StageTotal]:
    """Return the sums for each slice that all plans contain: those that hold all stages first, then by cost."""
    by_stage = {stage: {row["slice"]: row for row in found} for stage, found in rows.items()}
    names = [name for name in next(iter(by_stage.values())) if all(name in found for found in by_stage.values())]
    found = [_total(name, {stage: known[name] for stage, known in by_stage.items()}) for name in names]
    return sorted(found, key=lambda total: (not total.fits, total.on_demand_usd is None, total.on_demand_usd or 0.0))


def _total(name: str, rows: Mapping[str, Mapping[str, Any]]) -> StageTotal:
    misfits = tuple(stage for stage, row in rows.items() if not row["fits"])
    known = [] if misfits else list(rows.values())
    on_demand, spot = (_sum([(row["cost_usd"] or {}).get(way) for row in known]) for way in WAYS)
    return StageTotal(name, misfits, _sum([row["hours"] for row in known]), on_demand, spot)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def cheapest_choice(rows: StageRows) -> tuple[float, dict[str, str]] | None:
    """Return the lowest cost, each stage on its own slice, and these slices. None if a stage has no price."""
    chosen: dict[str, str] = {}
    cost_usd = 0.0
    for stage, found in rows.items():
        offers = [
            (usd, f"{row['slice']} {way.replace('_', ' ')}")
            for row in found
            if row["fits"]
            for way in WAYS
            if (usd := (row["cost_usd"] or {}).get(way)) is not None
        ]
        if not offers:
            return None
        usd, chosen[stage] = min(offers)
        cost_usd += usd
    return cost_usd, chosen


def over_stages_budget(rows: StageRows, max_usd: float) -> UserError | None:
    """Return an error if the stages cost more than the budget even on their cheapest slices, else None."""
    cheapest = cheapest_choice(rows)
    if cheapest is not None and cheapest[0] <= max_usd:
        return None
    if cheapest is None:
        why = "no price is known for the slices that hold a stage"
    else:
        slices = ", ".join(f"{stage} on {name}" for stage, name in cheapest[1].items())
        why = f"the cheapest choice costs {Usd(cheapest[0])}: {slices}"
    return UserError(
        "E-COMMAND-041",
        f"the stages together do not stay below ${max_usd:g}",
        why=why,
        fix="allow more with --max-usd, give your own prices with --prices FILE, or train for fewer steps",
    )


def print_totals(console: Console, rows: StageRows, max_usd: float | None = None) -> None:
    """Print the sums of all stages, and the cheapest choice of a slice for each stage."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("slice", "fits", "hours", "$ on demand", "$ spot"):
        table.add_column(heading, justify="left" if heading in ("slice", "fits") else "right", no_wrap=True)
    for total in totals_of(rows):
        fits = Text("all stages", style="green") if total.fits else Text(f"not {', '.join(total.misfits)}", style="red")
        money = ["-" if usd is None else usd_text(usd) for usd in (total.on_demand_usd, total.spot_usd)]
        table.add_row(
            Text(total.slice, style="bold"), fits, "-" if total.hours is None else hours_text(total.hours), *money
        )
    console.print(Text(f"total of {len(rows)} stages", style="bold"), "", sep="\n")
    console.print(table)
    if (cheapest := cheapest_choice(rows)) is not None:
        slices = ", ".join(f"{stage} on {name}" for stage, name in cheapest[1].items())
        over = " (over the budget)" if max_usd is not None and cheapest[0] > max_usd else ""
        console.print("", f"Cheapest: {usd_text(cheapest[0])}{over} for {slices}.", sep="\n")
    console.print("Each stage counts as its own start. The hours do not include writing the results between stages.")
