"""A run, and a comparison of runs, as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.pages.line_chart import value_text
from forerun.report.comparison import Comparison, answer
from forerun.report.differences import differences_from_defaults
from forerun.report.page import METRICS, TIME_NAMES, environment, figures, price_note, share_texts, subtitle
from forerun.report.run_facts import RunFacts
from forerun.report.run_record import RunRecord
from forerun.track.display.sparkline import blocks_for, sparkline
from forerun.units import Seconds

if TYPE_CHECKING:
    from rich.console import Console

CURVES = (("loss", "loss", "number"), ("validation_loss", "validation loss", "number"))
STYLES = {"finished": "bold green", "running": "bold cyan"}
PIPED_COLUMNS = 100
MAX_SKIPS, MAX_DIFFERENCES, MAX_SAMPLE = 10, 30, 300


def print_report(console: Console, record: RunRecord, facts: RunFacts) -> None:
    """Print the results, the curves, the time and the differences from the defaults of a run."""
    from rich.text import Text

    console.print(
        Text.assemble((record.name, "bold"), "  ", (str(facts.status), STYLES.get(facts.status.state, "bold yellow")))
    )
    console.print(Text(subtitle(record), "dim"))
    _print_table(console, "", figures(record, facts), ("dim", "bold", "dim"))

    # ---- Curves ----
    known = (*CURVES, *((key, title.lower().partition(",")[0], kind) for key, title, kind, _ in METRICS))
    curves = [(name, kind, values) for key, name, kind in known if (values := [v for _, v in record.points(key)])]
    width, blocks = max(10, min(60, console.width - 58)), blocks_for(console.encoding)
    rows = [
        (
            name,
            sparkline(values, width, blocks),
            value_text(values[-1], kind),
            f"{value_text(min(values), kind)} to {value_text(max(values), kind)}",
        )
        for name, kind, values in curves
    ]
    if not rows:
        console.print("\nNo step is recorded yet.")
    _print_table(console, "Curves", rows, ("dim", "cyan", ">", "dim"))

    # ---- Restarts and skipped steps ----
    lines = [f"resumed at step {step:,}, {Seconds(seconds)} after the start" for step, seconds in facts.restarts]
    skips = sorted(record.skips.items())
    lines += [f"skipped step {step:,}: {why}" for step, why in skips[:MAX_SKIPS]]
    if len(skips) > MAX_SKIPS:
        lines.append(f"and {len(skips) - MAX_SKIPS} more skipped steps")
    _print_table(console, "Restarts and skipped steps", [(line,) for line in lines], ("",))

    # ---- Time and cost ----
    if facts.seconds and facts.wall_seconds:
        names = [name for name in (*TIME_NAMES, *facts.seconds.keys() - TIME_NAMES.keys()) if facts.seconds.get(name)]
        shares = share_texts([facts.seconds[name] for name in names])
        times = [
            (TIME_NAMES.get(name, (name, ""))[0], str(Seconds(facts.seconds[name])), share)
            for name, share in zip(names, shares, strict=True)
        ]
        _print_table(console, "Where the time went", times, ("dim", ">", ">bold"))
    cost = facts.cost
    predicted = f"{Seconds(cost.predicted_seconds)} predicted" if cost.predicted_seconds else "not predicted"
    measured = f"{Seconds(cost.measured_seconds)} measured" if cost.measured_seconds else "not measured"
    _print_table(console, "Predicted and measured", [(f"step time: {predicted}, {measured}",)], ("",))
    if note := price_note(cost):
        console.print(Text(note, "dim"))

    # ---- Samples, job and environment ----
    if record.samples:
        step, texts = record.samples[-1]
        console.print(Text(f"\nSamples of step {step:,}", "bold"))
        for one in texts:
            console.print(Text.assemble((str(one.get("prompt", "")), "dim"), str(one.get("text", ""))[:MAX_SAMPLE]))
    differences = differences_from_defaults(record.job)
    changed = [(key, value, f"default {default}") for key, value, default in differences[:MAX_DIFFERENCES]]
    _print_table(console, "Differences from the defaults", changed, ("", "bold", "dim"))
    if len(differences) > MAX_DIFFERENCES:
        console.print(Text(f"and {len(differences) - MAX_DIFFERENCES} more", "dim"))
    _print_table(console, "Environment", [(row[""], row["value"]) for row in environment(record)], ("dim", ""))
    exports = [(str(one.get("folder")), str(one.get("format")), f"step {one.get('step')}") for one in record.exports]
    _print_table(console, "Exports", exports, ("", "dim", "dim"))


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
    curves = []
    for name, record in zip(comparison.names, comparison.records, strict=True):
        points = record.points(comparison.metric) or record.points("loss")
        curves.append((name, sparkline([value for _, value in points], width, blocks)))
    _print_table(console, f"{comparison.metric_name.capitalize()} by step", curves, ("", "cyan"))
    console.print(Text("\nValues that differ", "bold"))
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


def _print_table(console: Console, title: str, rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """Print a heading and a table without lines, or nothing if there are no rows.

    Args:
      styles: the style of each column; `>` before it aligns the column to the right.
    """
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    console.print()
    if title:
        console.print(Text(title, "bold"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for style in styles:
        is_right = style.startswith(">")
        table.add_column(justify="right" if is_right else "left", style=style.lstrip(">") or None, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
