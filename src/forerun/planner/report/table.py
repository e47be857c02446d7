"""The results of a plan as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import Impossible
from forerun.planner.cost.job_cost import JobCost, Offer, Tariff, job_cost_of
from forerun.planner.report.formatting import (
    UNCERTAIN,
    gib_text,
    hours_text,
    limit_text,
    range_text,
    rate_text,
    step_text,
    usd_text,
)
from forerun.planner.report.plan_notes import figure_notes, memory_notes, provider_of
from forerun.units import GIB

PARTS = (("weights", "cyan"), ("optimizer", "blue"), ("gradients + activations", "magenta"))
BAR_WIDTHS = (24, 16, 10)
# Columns that are dropped on narrow terminals, in this order: first with the memory bar, then without it. The headings
# of the first columns differ by platform, so columns have a key.
DROPPED_WITH_BAR = ("compile s", "optimizer", "weights", "chips", "devices")
DROPPED_WHEN_NARROW = (
    *("limit", "MFU", "tokens/s", "provider", "mesh"),
    *("$\nspot", "range", "$ on\ndemand", "hours", "step"),
)
BAR = "usable memory"


@dataclass(frozen=True)
class PlanRow:
    """A row of the table. `bill` is None if the job does not fit."""

    verdict: FitResult
    bill: JobCost | None


@dataclass(frozen=True)
class Column:
    """A column of the table: its key, and a function that returns its cell. The heading is the key by default."""

    key: str
    cell: Callable[[PlanRow], Text | str]
    justify: Literal["left", "right"] = "right"
    heading: str | None = None


@dataclass(frozen=True)
class TableLayout:
    """The columns of a table, and the spaces between them in addition to one."""

    columns: Sequence[Column]
    padding: int = 0


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
    chosen = print_widest(console, title, tables)
    has_bar = any(column.key == BAR for column in layouts[chosen].columns)
    console.print(
        "", _notes(rows, tariff, ascii_only if has_bar else None, [*(one.text for one in impossible), *notes]), sep="\n"
    )


def print_widest(console: Console, title: str, tables: Sequence[Table]) -> int:
    """Print a title and the first table that the console has space for, or the last one. Return its index."""
    roomy = console.options.update(width=1000)
    widths = [console.measure(table, options=roomy).maximum for table in tables]
    chosen = next((n for n, width in enumerate(widths) if width <= console.width), len(tables) - 1)
    console.width = max(console.width, widths[chosen])  # prefer a wrapped line to a truncated figure
    console.print(Text(title, style="bold"), "", sep="\n")
    console.print(tables[chosen])
    return chosen


def _columns(verdicts: Sequence[FitResult], tariff: Tariff) -> list[Column]:
    only_gpus = all(v.question.slice.platform == "gpu" for v in verdicts)
    place, chips = ("machine", "GPUs") if only_gpus else ("slice", "chips")
    columns = [
        Column("slice", lambda r: Text(r.verdict.slice_name, style="bold"), "left", place),
        Column("chips", lambda r: str(r.verdict.question.slice.chips), heading=chips),
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
        Column("provider", lambda r: Text(provider_of(r.bill.on_demand if r.bill else None) or "-", "dim"), "left"),
        Column("limit", lambda r: limit_text(r.verdict), "left"),
        Column("compile s", lambda r: f"{r.verdict.compile_seconds:.1f}"),
    ]
    unneeded = set()
    if all(v.question.slice.chip.devices_per_chip == 1 for v in verdicts):
        unneeded.add("devices")
    if all(v.question.slice.platform == "tpu" for v in verdicts):
        unneeded.add("provider")
    return [column for column in columns if column.key not in unneeded]


def _layouts(columns: Sequence[Column], ascii_only: bool) -> list[TableLayout]:
    """Return the layouts from the widest to the narrowest."""
    layouts = [TableLayout(_with_bar(columns, BAR_WIDTHS[0], ascii_only), padding=1)]
    for n in range(1, len(DROPPED_WITH_BAR) + 1):
        kept = [c for c in columns if c.key not in DROPPED_WITH_BAR[:n]]
        layouts += [TableLayout(_with_bar(kept, width, ascii_only), padding=1) for width in BAR_WIDTHS]
    layouts.append(TableLayout(_with_bar(kept, BAR_WIDTHS[-1], ascii_only)))
    for n in range(len(DROPPED_WHEN_NARROW) + 1):
        layouts.append(TableLayout([c for c in kept if c.key not in DROPPED_WHEN_NARROW[:n]]))
    return layouts


def _with_bar(columns: Sequence[Column], width: int, ascii_only: bool) -> list[Column]:
    """Replace the column of the limit by one with a memory bar, which has the limit at its end."""
    bar = Column(BAR, lambda r: _bar(r.verdict, width, ascii_only), "left")
    return [bar if column.key == "usable" else column for column in columns]


def _table(
    layout: TableLayout, rows: Sequence[PlanRow], ascii_only: bool, impossible: Sequence[Impossible] = ()
) -> Table:
    lines, columns = box.ASCII2 if ascii_only else box.SIMPLE_HEAD, layout.columns
    table = Table(box=lines, show_edge=False, pad_edge=False, padding=(0, layout.padding, 0, 0))
    for column in columns:
        heading = "" if column.key == "range" else column.heading or column.key
        table.add_column(heading, justify=column.justify, no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    for one in impossible:
        known = {"slice": Text(one.slice.name, style="bold"), "fits": Text("no", style="bold red"), "range": Text("")}
        table.add_row(*(known.get(column.key, Text("-", style="dim")) for column in columns))
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


def _notes(rows: Sequence[PlanRow], tariff: Tariff, ascii_only: bool | None, more: Sequence[str]) -> RenderableType:
    """Return the notes below the table: the legend of the bar, units, prices, warnings and the lines `more`.

    `ascii_only` is None if the layout has no bar. Then the legend is omitted.
    """
    notes = Text()
    if ascii_only is not None:
        for n, (name, colour) in enumerate(PARTS):
            notes.append("   " if n else "").append("#" if ascii_only else "█", style=colour).append(f" {name}")
        notes.append("\n")
    notes.append("\n".join(memory_notes([row.verdict for row in rows])), style="dim")
    for line in figure_notes([(row.verdict, row.bill) for row in rows], tariff):
        notes.append(f"\n{line}", style="yellow" if line.startswith(UNCERTAIN) else "dim")
    for v in (row.verdict for row in rows):
        if v.memory.host_bytes >= GIB / 100:
            notes.append(f"\n{v.slice_name}: {v.memory.host_bytes} per device are in host memory", style="yellow")
        if idle := v.question.idle_text():
            notes.append(f"\n{idle}", style="yellow")
    for line in more:
        notes.append(f"\n{line}", style="dim")
    return notes
