"""The results of a sweep as a table, as charts and as a page."""

from __future__ import annotations

import datetime
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from forerun.config.load import dump
from forerun.files import atomic_write
from forerun.pages.render import Cell, render
from forerun.pages.svg import Plot, Scale, both_widths, downsample, log_scale, log_ticks
from forerun.units import Count, Seconds
from forerun.verbs.sweep.grid import value_text
from forerun.verbs.sweep.run_sweep import PreparedSweep
from forerun.verbs.sweep.sweep_file import LOSS, VALIDATION, RunResult, SweepResults
from forerun.version import __version__

# ---- Charts ----


COLOURS = 10
LOG_RATIO = 8  # an axis is logarithmic if its largest value is at least this many times its smallest

Legend = list[tuple[str, str, str]]


def colours_of(results: SweepResults) -> dict[str, str]:
    """Return the CSS class of each run.

    If there are more runs than colours, runs with the same value of the first axis share one.
    """
    runs = results.runs
    if len(runs) <= COLOURS:
        return {run.name: f"c{number}" for number, run in enumerate(runs)}
    groups = list(dict.fromkeys(str(next(iter(run.values.values()))) for run in runs))
    return {run.name: f"c{groups.index(str(next(iter(run.values.values())))) % COLOURS}" for run in runs}


def curve_legend(results: SweepResults) -> Legend:
    """Return the entries of the legend: (CSS class, values, metric)."""
    colours = colours_of(results)
    entries: dict[str, tuple[str, str, str]] = {}
    for run in results.runs:
        value = results.value(run)
        if len(results.runs) <= COLOURS:
            share = run.state if value is None else f"{value:.4f}"
            entries[run.name] = (colours[run.name], run.label, share)
        else:
            key, first = next(iter(run.values.items()))
            entries.setdefault(colours[run.name], (colours[run.name], f"{key}={first}", ""))
    return list(entries.values())


def loss_chart(results: SweepResults) -> dict[str, Plot] | None:
    """Return the losses of all runs by step, for wide and narrow screens. None if no run has two logged steps.

    If the runs are compared by their validation loss, this is shown, otherwise the training loss.
    """
    curves = {}
    for run in results.runs:
        points = run.validation_curve if results.metric == VALIDATION else run.curve
        finite = [(step, loss) for step, loss in points if math.isfinite(loss)]
        if len(finite) > 1:
            curves[run.name] = downsample(finite)
    if not curves:
        return None
    shown = [point for curve in curves.values() for point in curve]
    steps, losses = [step for step, _ in shown], [loss for _, loss in shown]
    # A run that diverges must not flatten the others: the top is at most twice the largest first loss.
    top = min(max(losses), 2 * max(curve[0][1] for curve in curves.values()))
    low, space = min(losses), max(0.06 * (top - min(losses)), 1e-3)
    x, y = Scale(min(steps), max(steps)), Scale(low - space, top + space)
    colours, best = colours_of(results), results.best

    def draw(size: tuple[int, int]) -> Plot:
        plot = Plot(size, x, y, f"{results.metric} of {len(curves)} runs by step")
        middle = round((min(steps) + max(steps)) / 2)
        plot.x_axis({step: f"{step:,g}" for step in sorted({min(steps), middle, max(steps)})}, "step")
        plot.y_axis({value: f"{value:.3g}" for value in (low, (low + top) / 2, top)}, results.metric)
        for name, curve in sorted(curves.items(), key=lambda item: best is not None and item[0] == best.name):
            thick = " best" if best is not None and name == best.name else ""
            plot.line([(step, min(loss, top + space)) for step, loss in curve], f"curve {colours[name]}{thick}")
        return plot

    return both_widths(draw, 380)


def numeric_axes(runs: Sequence[RunResult]) -> list[str]:
    """Return the swept keys whose values are numbers with an order. The seed is a number, but has none."""
    keys = [key for key in (runs[0].values if runs else ()) if key != "seed"]
    return [
        key
        for key in keys
        if all(isinstance(run.values[key], int | float) and not isinstance(run.values[key], bool) for run in runs)
    ]


def axis_chart(results: SweepResults, key: str) -> dict[str, Plot] | None:
    """Return the metric by the values of a key: a point for each finished run, and a line through the means.

    None if fewer than two values have a result.
    """
    runs = [(run, value) for run in results.runs if (value := results.value(run)) is not None and math.isfinite(value)]
    groups: dict[float, list[float]] = {}
    for run, value in runs:
        groups.setdefault(float(run.values[key]), []).append(value)
    if len(groups) < 2:
        return None
    numbers, metrics = sorted(groups), [value for _, value in runs]
    is_log = numbers[0] > 0 and numbers[-1] >= LOG_RATIO * numbers[0]
    space = 0.06 * (numbers[-1] - numbers[0])
    x = log_scale(numbers) if is_log else Scale(numbers[0] - space, numbers[-1] + space)
    low, high = min(metrics), max(metrics)
    y_space = max(0.1 * (high - low), 1e-3)
    colours = colours_of(results)

    def draw(size: tuple[int, int]) -> Plot:
        plot = Plot(size, x, Scale(low - y_space, high + y_space), f"{results.metric} by {key}")
        most = 8 if size[0] > 500 else 4
        ticks = numbers if len(numbers) <= most else log_ticks(x, most) if is_log else [numbers[0], numbers[-1]]
        plot.x_axis({tick: f"{tick:g}" for tick in ticks}, key)
        plot.y_axis({value: f"{value:.4g}" for value in (low, (low + high) / 2, high)}, results.metric)
        plot.line([(number, statistics.mean(groups[number])) for number in numbers], "front")
        for run, value in runs:
            plot.point(float(run.values[key]), value, colours[run.name], f"{run.label}: {value:.4f}")
        return plot

    return both_widths(draw, 340)


# ---- Table and page ----


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
