"""Charts of a sweep: the losses of all runs by step, and the metric by a swept number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from forerun.pages.svg import Plot, Scale, both_widths, downsample, log_scale, log_ticks
from forerun.verbs.sweep.results import VALIDATION, RunResult, SweepResults

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
