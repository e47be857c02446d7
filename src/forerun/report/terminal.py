"""A run, and a comparison of runs, as text for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.pages.chart_ticks import value_text
from forerun.report.comparison import Comparison, answer
from forerun.report.job_differences import differences_from_defaults
from forerun.report.page import METRICS, TIME_NAMES, environment, figures, price_note, share_texts, subtitle
from forerun.report.run_facts import RunFacts
from forerun.report.run_record import RunRecord
from forerun.track.display.sparkline import blocks_for, sparkline
from forerun.units import Seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

CURVES = (("loss", "loss", "number"), ("validation_loss", "validation loss", "number"))
STYLES = {"finished": "bold green", "running": "bold cyan"}
PIPED_COLUMNS = 100
MAX_DIFFERENCES, MAX_SAMPLE = 30, 300


def print_report(console: Console, record: RunRecord, facts: RunFacts) -> None:
    """Print the results, the curves, the time and the differences from the defaults of a run."""
    from rich.text import Text

    console.print(
        Text.assemble((record.name, "bold"), "  ", (str(facts.status), STYLES.get(facts.status.state, "bold yellow")))
    )
    console.print(Text(subtitle(record), "dim"))
    console.print()
    results = _grid(("", "dim"), ("", "bold"), ("", "dim"))
    for name, value, remark in figures(record, facts):
        results.add_row(name, value, remark)
    console.print(results)
    _print_curves(console, record)
    _print_events(console, record, facts)
    _print_time(console, facts)
    _print_prediction(console, facts)
    if record.samples:
        step, texts = record.samples[-1]
        _heading(console, f"Samples of step {step:,}")
        for one in texts:
            console.print(Text.assemble((str(one.get("prompt", "")), "dim"), str(one.get("text", ""))[:MAX_SAMPLE]))
    if differences := differences_from_defaults(record.job):
        _heading(console, "Differences from the defaults")
        table = _grid(("", ""), ("", "bold"), ("", "dim"))
        for key, value, default in differences[:MAX_DIFFERENCES]:
            table.add_row(key, value, f"default {default}")
        console.print(table)
        if len(differences) > MAX_DIFFERENCES:
            console.print(Text(f"and {len(differences) - MAX_DIFFERENCES} more", "dim"))
    if found := environment(record):
        _heading(console, "Environment")
        table = _grid(("", "dim"), ("", ""))
        for row in found:
            table.add_row(row[""], row["value"])
        console.print(table)
    if record.exports:
        _heading(console, "Exports")
        table = _grid(("", ""), ("", "dim"), ("", "dim"))
        for one in record.exports:
            table.add_row(str(one.get("folder")), str(one.get("format")), f"step {one.get('step')}")
        console.print(table)


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the results of the runs, their loss curves, and the values that differ."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    rows = comparison.rows
    for head in rows[0]:
        is_text = head in ("run", "status", "best validation")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text("–" if cell is None else str(cell)) for cell in row.values()))
    console.print(table)
    console.print()
    console.print(Text(answer(comparison)))
    width = max(10, min(60, console.width - max(len(name) for name in comparison.names) - 4))
    blocks = blocks_for(console.encoding)
    _heading(console, f"{comparison.metric_name.capitalize()} by step")
    curves = _grid(("", ""), ("", "cyan"))
    for name, record in zip(comparison.names, comparison.records, strict=True):
        points = record.points(comparison.metric) or record.points("loss")
        curves.add_row(name, sparkline([value for _, value in points], width, blocks))
    console.print(curves)
    _heading(console, "Values that differ")
    if not comparison.differences:
        console.print("The jobs are the same.")
        return
    keys = Table(box=None, pad_edge=False, header_style="dim")
    keys.add_column("key", overflow="fold")
    for name in comparison.names:
        keys.add_column(name, overflow="fold")
    for key, texts in comparison.differences:
        keys.add_row(Text(key), *(Text(text, "bold") for text in texts))
    console.print(keys)


def _print_curves(console: Console, record: RunRecord) -> None:
    known = (*CURVES, *((key, title.lower().partition(",")[0], kind) for key, title, kind, _ in METRICS))
    shown = [(name, kind, values) for key, name, kind in known if (values := [v for _, v in record.points(key)])]
    if not shown:
        console.print("\nNo step is recorded yet.")
        return
    _heading(console, "Curves")
    table = _grid(("", "dim"), ("", "cyan"), ("right", ""), ("", "dim"))
    width, blocks = max(10, min(60, console.width - 58)), blocks_for(console.encoding)
    for name, kind, values in shown:
        limits = f"{value_text(min(values), kind)} to {value_text(max(values), kind)}"
        table.add_row(name, sparkline(values, width, blocks), value_text(values[-1], kind), limits)
    console.print(table)


def _print_events(console: Console, record: RunRecord, facts: RunFacts) -> None:
    if not facts.restarts and not record.skips:
        return
    from rich.text import Text

    _heading(console, "Restarts and skipped steps")
    for step, seconds in facts.restarts:
        after = f", {Seconds(seconds)} after the start" if seconds is not None else ""
        console.print(Text(f"resumed at step {step:,}{after}"))
    skips = sorted(record.skips.items())
    for step, why in skips[:10]:
        console.print(Text(f"skipped step {step:,}: {why}"))
    if len(skips) > 10:
        console.print(Text(f"and {len(skips) - 10} more skipped steps", "dim"))


def _print_time(console: Console, facts: RunFacts) -> None:
    if not facts.seconds or not facts.wall_seconds:
        return
    _heading(console, "Where the time went")
    table = _grid(("", "dim"), ("right", ""), ("right", "bold"))
    names = [name for name in (*TIME_NAMES, *facts.seconds.keys() - TIME_NAMES.keys()) if facts.seconds.get(name)]
    for name, share in zip(names, share_texts([facts.seconds[name] for name in names]), strict=True):
        table.add_row(TIME_NAMES.get(name, (name, ""))[0], str(Seconds(facts.seconds[name])), share)
    console.print(table)


def _print_prediction(console: Console, facts: RunFacts) -> None:
    from rich.text import Text

    cost = facts.cost
    _heading(console, "Predicted and measured")
    predicted = f"{Seconds(cost.predicted_seconds)} predicted" if cost.predicted_seconds else "not predicted"
    measured = f"{Seconds(cost.measured_seconds)} measured" if cost.measured_seconds else "not measured"
    console.print(Text(f"step time: {predicted}, {measured}"))
    if note := price_note(cost):
        console.print(Text(note, "dim"))


def _heading(console: Console, text: str) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(text, "bold"))


def _grid(*columns: tuple[str, str]) -> Table:
    """Return a table without lines. A column has an alignment and a style."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for align, style in columns:
        table.add_column(justify="right" if align == "right" else "left", style=style or None, overflow="fold")
    return table
