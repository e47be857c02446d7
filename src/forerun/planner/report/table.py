"""The results of a plan as a table for the terminal and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import Impossible
from forerun.planner.cost.job_cost import JobCost, Offer, Tariff, job_cost_of
from forerun.planner.cost.save_interval import WASTE
from forerun.planner.report.formatting import (
    doubt_notes,
    gib_text,
    hours_text,
    range_text,
    rate_text,
    seconds_text,
    step_text,
    usd_text,
)
from forerun.units import GIB

PARTS = (("weights", "cyan"), ("optimizer", "blue"), ("gradients + activations", "magenta"))
BAR_WIDTHS = (24, 16, 10)
# Columns that are dropped on narrow terminals, in this order: first with the memory bar, then without it.
DROPPED_WITH_BAR = ("compile s", "optimizer", "weights", "chips", "devices")
DROPPED_WHEN_NARROW = ("limit", "MFU", "tokens/s", "mesh", "$\nspot", "range", "$ on\ndemand", "hours", "step")
NO_GPUS = "GPUs are not compared: no sourced step time of this program on a GPU is known."

Changes = Mapping[str, Sequence[str]]  # by slice: overrides that the job needed to run on it


def as_json(
    verdicts: Sequence[FitResult],
    tariff: Tariff | None = None,
    changes: Changes | None = None,
    impossible: Sequence[Impossible] = (),
) -> dict[str, Any]:
    """Return the results as a JSON object. Its keys are stable, because programs read them.

    Bytes are of one device. Dollars and hours are of the complete job.
    """
    rows = [_slice_json(v, tariff or Tariff(), (changes or {}).get(_name(v), ())) for v in verdicts]
    return {"slices": [*rows, *(_impossible_json(one, rows[0]) for one in impossible)]}


def _impossible_json(one: Impossible, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the same keys as the others, in which only the slice, `fits` and `error` have values."""
    error = {"code": one.error.code, "what": one.what, "why": one.error.why, "fix": one.error.fix}
    known = {"slice": one.slice.name, "fits": False, "chips": one.slice.chips, "devices": one.slice.devices}
    return {**dict.fromkeys(like), **known, "changes": [], "error": error}


def _slice_json(v: FitResult, tariff: Tariff, changes: Sequence[str]) -> dict[str, Any]:
    return {
        "slice": _name(v),
        "fits": v.fits,
        "hbm_peak_bytes": int(v.memory.peak_bytes),
        "hbm_limit_bytes": int(v.limit_bytes),
        "compile_seconds": round(float(v.compile_seconds), 3),
        "chips": v.question.slice.chips,
        "devices": v.question.slice.devices,
        "devices_used": v.question.devices,
        "mesh": v.mesh,
        "program": v.program,
        "hbm_weights_bytes": int(v.memory.weights_bytes),
        "hbm_optimizer_bytes": int(v.memory.optimizer_bytes),
        "hbm_batch_bytes": int(v.memory.batch_bytes),
        "hbm_working_bytes": int(v.memory.working_bytes),
        "host_bytes": int(v.memory.host_bytes),
        "hbm_ledger": {
            **{_key(name): int(size) for name, size in v.ledger.items()},
            "host_offloaded": int(v.memory.host_bytes),
        },
        **_time_json(v),
        **_money_json(job_cost_of(v, tariff), tariff),
        "changes": [one for change in changes for one in change.split()],
        "error": None,
    }


def _key(words: str) -> str:
    return words.replace(" ", "_").replace("-", "_")


def _time_json(v: FitResult) -> dict[str, Any]:
    step = v.step
    seconds = {"low": step.low_seconds, "mid": step.mid_seconds, "high": step.high_seconds} if step else None
    return {
        "step_seconds": seconds,
        "time_breakdown": {_key(part): seconds for part, seconds in step.parts_seconds.items()} if step else None,
        "tokens_per_second": v.tokens_per_second,
        "mfu": v.mfu,
        "limit": step.limit if step else None,
        "floor_seconds": step.floor_seconds if step else None,
        "uncertain": list(step.doubts) if step else [],
    }


def _money_json(bill: JobCost | None, tariff: Tariff) -> dict[str, Any]:
    on_demand, spot = (bill.on_demand, bill.spot) if bill else (None, None)
    return {
        "hours": bill.hours.mid if bill else None,
        "hours_range": bill.hours.as_dict() if bill else None,
        "cost_usd": {"on_demand": _usd(on_demand), "spot": _usd(spot)},
        "zone": {"on_demand": _zone(on_demand), "spot": _zone(spot)},
        "within_max_usd": None if tariff.max_usd is None else bool(bill and bill.within(tariff.max_usd)),
        "spot": {
            "hours": bill.spot_hours.mid,
            "preemptions": bill.preemptions,
            "overhead": bill.spot_overhead,
            "checkpoint_every": bill.best_every,
        }
        if bill and bill.spot_hours
        else None,
        "checkpoint_every": bill.saves.every if bill else None,
        "checkpoint_waste": _finite(bill.save_waste) if bill else None,
        "checkpoint_bytes": int(bill.saves.state_bytes) if bill else None,
        "written_bytes": int(bill.written_bytes) if bill else None,
        "kept_bytes": int(bill.kept_bytes) if bill else None,
    }


def _finite(share: float) -> float | None:
    return round(share, 4) if math.isfinite(share) else None


def _usd(offer: Offer | None) -> float | None:
    return round(offer.usd.mid, 4) if offer else None


def _zone(offer: Offer | None) -> str | None:
    return offer.price.zone if offer else None


def _name(v: FitResult) -> str:
    return v.question.slice.name


@dataclass(frozen=True)
class PlanRow:
    """A row of the table. `bill` is None if the job does not fit."""

    verdict: FitResult
    bill: JobCost | None


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, and a function that returns its cell for a row."""

    heading: str
    cell: Callable[[PlanRow], Text | str]
    justify: Literal["left", "right"] = "right"


def print_table(
    console: Console,
    verdicts: Sequence[FitResult],
    title: str,
    tariff: Tariff | None = None,
    notes: Sequence[str] = (),
    impossible: Sequence[Impossible] = (),
) -> None:
    """Print the table in the widest layout that the console has space for.

    Figures are never truncated. Instead, the least important columns are dropped first.
    """
    tariff = tariff or Tariff()
    rows = [PlanRow(v, job_cost_of(v, tariff)) for v in verdicts]
    ascii_only = not console.encoding.lower().startswith("utf")
    layouts = _layouts(_columns(verdicts, tariff), ascii_only)
    tables = [_table(layout, rows, ascii_only, impossible) for layout in layouts]
    roomy = console.options.update(width=1000)
    widths = [console.measure(table, options=roomy).maximum for table in tables]
    chosen = next((n for n, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])  # prefer a wrapped line to a truncated figure
    console.print(Text(title, style="bold"), "", sep="\n")
    console.print(tables[chosen])
    has_bar = any(column.heading == "usable HBM" for column in layouts[chosen])
    console.print(
        "", _notes(rows, tariff, ascii_only if has_bar else None, [*(one.text for one in impossible), *notes]), sep="\n"
    )


def _columns(verdicts: Sequence[FitResult], tariff: Tariff) -> list[Column]:
    columns = [
        Column("slice", lambda r: Text(_name(r.verdict), style="bold"), "left"),
        Column("chips", lambda r: str(r.verdict.question.slice.chips)),
        Column("devices", lambda r: str(r.verdict.question.slice.devices)),
        Column("mesh", lambda r: r.verdict.mesh, "left"),
        Column("fits", lambda r: _fits(r.verdict), "left"),
        Column("peak", lambda r: gib_text(r.verdict.memory.peak_bytes)),
        Column("usable", lambda r: gib_text(r.verdict.limit_bytes)),
        Column("weights", lambda r: gib_text(r.verdict.memory.weights_bytes)),
        Column("optimizer", lambda r: gib_text(r.verdict.memory.optimizer_bytes)),
        Column("step", lambda r: step_text(r.verdict)),
        Column("range", lambda r: Text(range_text(r.verdict), style="dim"), "left"),
        Column("tokens/s", lambda r: rate_text(r.verdict.tokens_per_second)),
        Column("MFU", lambda r: "-" if r.verdict.mfu is None else f"{r.verdict.mfu:.0%}"),
        Column("hours", lambda r: hours_text(r.bill.hours.mid) if r.bill else "-"),
        Column("$ on\ndemand", lambda r: _dollars(r.bill.on_demand if r.bill else None, tariff)),
        Column("$\nspot", lambda r: _dollars(r.bill.spot if r.bill else None, tariff)),
        Column("limit", lambda r: r.verdict.step.limit if r.verdict.step else "-", "left"),
        Column("compile s", lambda r: f"{r.verdict.compile_seconds:.1f}"),
    ]
    if not _split_chips(verdicts):
        columns = [column for column in columns if column.heading != "devices"]
    return columns


def _layouts(columns: Sequence[Column], ascii_only: bool) -> list[list[Column]]:
    """Return lists of columns, from the widest layout to the narrowest."""
    layouts = [_with_bar(columns, BAR_WIDTHS[0], ascii_only)]
    for n in range(1, len(DROPPED_WITH_BAR) + 1):
        kept = [c for c in columns if c.heading not in DROPPED_WITH_BAR[:n]]
        layouts += [_with_bar(kept, width, ascii_only) for width in BAR_WIDTHS]
    for n in range(len(DROPPED_WHEN_NARROW) + 1):
        layouts.append([c for c in columns if c.heading not in (*DROPPED_WITH_BAR, *DROPPED_WHEN_NARROW[:n])])
    return layouts


def _with_bar(columns: Sequence[Column], width: int, ascii_only: bool) -> list[Column]:
    """Replace the column of the limit by one with a memory bar, which has the limit at its end."""
    bar = Column("usable HBM", lambda r: _bar(r.verdict, width, ascii_only), "left")
    return [bar if column.heading == "usable" else column for column in columns]


def _table(
    columns: Sequence[Column], rows: Sequence[PlanRow], ascii_only: bool, impossible: Sequence[Impossible] = ()
) -> Table:
    lines = box.ASCII2 if ascii_only else box.SIMPLE_HEAD
    roomy = any(column.heading == "usable HBM" for column in columns)  # without the bar the terminal is narrow
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, 1 if roomy else 0, 0, 0))
    for column in columns:
        heading = "" if column.heading == "range" else column.heading
        table.add_column(heading, justify=column.justify, no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    for one in impossible:
        known = {"slice": Text(one.slice.name, style="bold"), "fits": Text("no", style="bold red"), "range": Text("")}
        table.add_row(*(known.get(column.heading, Text("-", style="dim")) for column in columns))
    return table


def _dollars(offer: Offer | None, tariff: Tariff) -> Text:
    if offer is None:
        return Text("-", style="dim")
    if tariff.max_usd is not None and offer.usd.mid > tariff.max_usd:
        return Text(f"{usd_text(offer.usd.mid)} over", style="red")
    return Text(usd_text(offer.usd.mid))


def _fits(v: FitResult) -> Text:
    return Text("yes", style="green") if v.fits else Text(f"{gib_text(-v.spare_bytes)} short", style="bold red")


def _parts(v: FitResult) -> tuple[int, int, int]:
    """Return the bytes of weights, optimizer and the rest, in the order of PARTS. They add up to the peak."""
    return v.memory.weights_bytes, v.memory.optimizer_bytes, v.memory.working_bytes + v.memory.batch_bytes


def _bar(v: FitResult, width: int, ascii_only: bool) -> Text:
    """Return a bar: blocks for used memory, dots for free memory, then the limit.

    The bar of a job that does not fit ends with a red arrow.
    """
    bar = Text()
    full, free = ("#", ".") if ascii_only else ("█", "·")
    scale = width / v.limit_bytes
    used = 0
    for part, (_, colour) in zip(_parts(v), PARTS, strict=True):
        end = min(width, round((used + part) * scale))
        bar.append(full * (end - len(bar)), style=colour)
        used += part
    if not v.fits and len(bar) == width:
        bar.right_crop(1)
        bar.append(">" if ascii_only else "▶", style="bold red")
    bar.append(free * (width - len(bar)), style="dim")
    return bar.append(f" {gib_text(v.limit_bytes):>5}")


def _split_chips(verdicts: Sequence[FitResult]) -> list[str]:
    """Return the generations whose chips appear as two devices."""
    chips = {v.question.slice.chip for v in verdicts}
    return sorted(chip.name for chip in chips if chip.devices_per_chip == 2)


def _notes(rows: Sequence[PlanRow], tariff: Tariff, ascii_only: bool | None, more: Sequence[str]) -> RenderableType:
    """Return the notes below the table: the legend of the bar, units, prices, warnings and the lines `more`.

    `ascii_only` is None if the layout has no bar. Then the legend is omitted.
    """
    notes = Text()
    if ascii_only is not None:
        for n, (name, colour) in enumerate(PARTS):
            notes.append("   " if n else "").append("#" if ascii_only else "█", style=colour).append(f" {name}")
        notes.append("\n")
    split = _split_chips([row.verdict for row in rows])
    per = f"device; a chip of {' and '.join(split)} is two devices" if split else "chip"
    notes.append(f"GiB per {per}. Memory is from the TPU compiler's report.", style="dim")
    for line in price_notes([(row.verdict, row.bill) for row in rows], tariff):
        notes.append(f"\n{line}", style="dim")
    for row in rows:
        if row.verdict.memory.host_bytes >= GIB / 100:
            waiting = f"{_name(row.verdict)}: {row.verdict.memory.host_bytes} per device are in host memory"
            notes.append(f"\n{waiting}", style="yellow")
    for line in doubt_notes([row.verdict for row in rows]):
        notes.append(f"\n{line}", style="yellow")
    for row in rows:
        if idle := row.verdict.question.idle_text():
            notes.append(f"\n{idle}", style="yellow")
    for line in more:
        notes.append(f"\n{line}", style="dim")
    return notes


def save_notes(bills: Sequence[tuple[FitResult, JobCost]]) -> list[str]:
    """Return an explanation of an automatic checkpoint.every, or a warning for each slice where it wastes time."""
    chosen = [f"{bill.saves.every} on {_name(v)}" for v, bill in bills if v.question.job.checkpoint.every == "auto"]
    if chosen:
        return [f"checkpoint.every (auto): {', '.join(chosen)}. On {_name(bills[0][0])}, {_save_times(*bills[0])}."]
    return [
        f"Warning: checkpoint.every={bill.saves.every} takes "
        + (f"{bill.save_waste:.0%} more time" if math.isfinite(bill.save_waste) else "infinitely more time")
        + f" on {_name(v)} than checkpoint.every={bill.best_every} (assumed preemptions): {_save_times(v, bill)}."
        for v, bill in bills
        if bill.save_waste > WASTE
    ]


def _save_times(v: FitResult, bill: JobCost) -> str:
    assert v.step is not None
    pause, write, step = map(seconds_text, (bill.saves.pause_seconds, bill.saves.write_seconds, v.step.mid_seconds))
    return (
        f"a save of {bill.saves.state_bytes} pauses the run for {pause} and takes {write} to write; a step takes {step}"
    )


def price_notes(rows: Sequence[tuple[FitResult, JobCost | None]], tariff: Tariff) -> list[str]:
    """Return notes on the prices: their date and zone, slices without a price, and the assumptions for spot."""
    bills = [(v, bill) for v, bill in rows if bill]
    if not bills:
        return []
    offers = [offer for _, bill in bills for offer in (bill.on_demand, bill.spot) if offer]
    dates = sorted({offer.price.date for offer in offers})
    notes = []
    if offers:
        where = f"zone {tariff.zone}" if tariff.zone else "the cheapest zone of each slice (or: --zone ZONE)"
        notes.append(f"Dollars: list prices of {' and '.join(dates)} in {where}, start and checkpoints included.")
    lacking = [_name(v) for v, bill in bills if bill.on_demand is None]
    if lacking:
        place = f" in {tariff.zone}" if tariff.zone else ""
        notes.append(f"No price is known{place} for {', '.join(lacking)}: set it with --prices FILE.")
    cheapest = min((b for b in bills if b[1].spot), key=lambda b: b[1].spot.usd.mid, default=None)  # type: ignore[union-attr]
    if cheapest:
        v, bill = cheapest
        assert bill.spot
        notes.append(
            f"Cheapest: {_name(v)} on spot in {bill.spot.price.zone}, {bill.preemptions:.1f} preemptions expected "
            f"(assumed rate); it writes {bill.written_bytes} of checkpoints and metrics."
        )
    return [*notes, *save_notes(bills), NO_GPUS]
