"""The report of a sweep: a table for the terminal, `sweep.md`, and the page `sweep.html`."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from forerun.config.load import dump
from forerun.files import atomic_write
from forerun.pages.render import Cell, render
from forerun.units import Count, Seconds
from forerun.verbs.sweep.charts import axis_chart, curve_legend, loss_chart, numeric_axes
from forerun.verbs.sweep.grid import value_text
from forerun.verbs.sweep.results import LOSS, RunResult, SweepResults
from forerun.verbs.sweep.run_sweep import PreparedSweep
from forerun.version import __version__

MARKDOWN, PAGE = "sweep.md", "sweep.html"
BEST = "best"
WIDE = 100  # columns of a terminal from which the table names the folder of each run


def columns_of(results: SweepResults, *, folders: bool = True) -> list[str]:
    """Return the heads of the table: the swept keys, the metric, and facts of the run."""
    keys = list(results.runs[0].values) if results.runs else []
    metrics = [LOSS] if results.metric == LOSS else [results.metric, LOSS]
    return ["", *keys, *metrics, "tokens", "time", "state", *(["run"] if folders else [])]


def cells_of(results: SweepResults, run: RunResult, *, folders: bool = True) -> list[str]:
    """Return the texts of a row of the table. An unknown value is `-`."""
    best = results.best
    metrics = [run.loss] if results.metric == LOSS else [run.validation_loss, run.loss]
    return [
        BEST if best is not None and run.name == best.name else "",
        *(value_text(value) for value in run.values.values()),
        *("-" if value is None else f"{value:.4f}" for value in metrics),
        "-" if run.tokens is None else str(Count(run.tokens)),
        str(Seconds(run.seconds)) if run.seconds else "-",
        run.state,
        *([run.folder.name] if folders else []),
    ]


def print_table(console: Console, results: SweepResults) -> None:
    """Print the runs as a table, the best first. A narrow terminal shows no folders."""
    folders = console.width >= WIDE
    heads = columns_of(results, folders=folders)
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    texts = ("", "state", "run")
    for number, head in enumerate(heads):
        # The last part of a key is enough to recognise it, and the table stays narrow.
        short = head.rpartition(".")[2] if 0 < number <= len(results.runs[0].values) else head
        table.add_column(short, justify="left" if head in texts else "right", no_wrap=head != "run", overflow="fold")
    styles = {"failed": "red", "stopped": "yellow", "waiting": "dim", "running": "dim"}
    for run in results.runs:
        cells = cells_of(results, run, folders=folders)
        table.add_row(*map(Text, cells), style="bold green" if cells[0] else styles.get(run.state))
    console.print(table)


def markdown(sweep: PreparedSweep, results: SweepResults) -> str:
    """Return the content of `sweep.md`."""
    heads = columns_of(results)
    lines = [
        f"# Sweep of {sweep.base.name}",
        "",
        *(f"- {line}" for line in notes(sweep, results)),
        "",
        "| " + " | ".join(heads) + " |",
        "|" + " --- |" * len(heads),
        *("| " + " | ".join(cells_of(results, run)) + " |" for run in results.runs),
        "",
    ]
    return "\n".join(lines)


def notes(sweep: PreparedSweep, results: SweepResults) -> list[str]:
    """Return lines about the results: the best run, the metric, and the programs."""
    best, lines = results.best, []
    if best is not None:
        lines.append(f"best: {best.label}, {results.metric} {results.value(best):.4f}, in {best.folder}")
    meaning = "the lowest of each run" if results.metric != LOSS else "of the last logged step, one batch only"
    lines.append(f"ordered by {results.metric}, {meaning}")
    counts = {state: len(results.of_state(state)) for state in ("finished", "failed", "stopped", "running", "waiting")}
    lines.append(", ".join(f"{count} {state}" for state, count in counts.items() if count))
    if results.programs:
        cached = sum(run.compile_cached is True for run in results.runs)
        lines.append(
            f"compiled programs: {len(results.programs)}; runs that found theirs in the compile cache: {cached}"
        )
    lines += [f"failed: {run.label}: {run.error or 'no message'}" for run in results.of_state("failed")]
    return lines


def page(sweep: PreparedSweep, results: SweepResults) -> str:
    """Return the content of `sweep.html`."""
    heads = columns_of(results)
    rows = [dict(zip(heads, _page_cells(results, run), strict=True)) for run in results.runs]
    charts = [(key, chart) for key in numeric_axes(results.runs) if (chart := axis_chart(results, key))]
    return render(
        "sweep.html.jinja",
        page_title=f"Sweep of {sweep.base.name}",
        name=sweep.base.name,
        axes=[f"{axis.key}: {', '.join(map(value_text, axis.values))}" for axis in sweep.grid.axes],
        today=datetime.date.today().isoformat(),
        notes=notes(sweep, results),
        finished=results.best is not None,
        rows=rows,
        words=("state", "run"),
        metric=results.metric,
        legend_entries=curve_legend(results),
        losses=loss_chart(results),
        charts=charts,
        job=dump(sweep.base, defaults=False),
        version=__version__,
    )


def _page_cells(results: SweepResults, run: RunResult) -> Sequence[str | Cell]:
    mark, *cells = cells_of(results, run)
    css = {"failed": "bad"}.get(run.state)
    state = len(cells) - 2
    return [
        Cell(mark, css="good"),
        *(Cell(text, css=css) if number == state else text for number, text in enumerate(cells)),
    ]


def write_report(sweep: PreparedSweep, results: SweepResults) -> list[Path]:
    """Write `sweep.md` and `sweep.html` into the folder of the sweep, and return their paths."""
    paths = [sweep.folder / MARKDOWN, sweep.folder / PAGE]
    sweep.folder.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, (markdown(sweep, results), page(sweep, results)), strict=True):
        atomic_write(path, content)
    return paths


def shown_path(path: Path) -> str:
    """Return a path for the user: relative to the working directory if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
