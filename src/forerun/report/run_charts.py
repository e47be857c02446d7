"""The charts of a run: its curves over steps, and its steps over time."""

from __future__ import annotations

from bisect import bisect_left

from forerun.pages.line_chart import Curve, LineChart, Mark, line_chart
from forerun.report.run_facts import RunFacts, start_seconds
from forerun.report.run_record import RunRecord

# key of the metrics, title, format, and whether the axis starts at 0
METRICS = (
    ("lr", "Learning rate", "number", True),
    ("grad_norm", "Gradient norm", "number", False),
    ("tokens_per_second", "Tokens per second", "rate", True),
    ("step_seconds", "Step time", "seconds", True),
    ("mfu", "MFU", "percent", True),
    ("wait_share", "Data wait, share of the time", "percent", True),
    ("hbm_bytes", "Device memory", "bytes", True),
    ("goodput", "Goodput so far", "percent", True),
)
PEAK = "hbm_peak_bytes"


def loss_chart(record: RunRecord, facts: RunFacts) -> LineChart | None:
    """Return the loss and the validation loss by step."""
    losses, validation = record.points("loss"), record.points("validation_loss")
    curves = [Curve("loss", losses), Curve("validation", validation, "c2", dots=len(validation) < 100)]
    # A loss that diverges must not flatten the rest of the curve.
    top = 2 * losses[0][1] if losses and losses[0][1] > 0 else None
    return line_chart("Loss", curves, marks=step_marks(record, facts), top=top, log=False, tall=True)


def metric_charts(record: RunRecord, facts: RunFacts) -> list[LineChart]:
    """Return the charts of all other metrics that the run has recorded."""
    marks = step_marks(record, facts)
    found = []
    for key, title, kind, from_zero in METRICS:
        curves = [Curve(title, record.points(key))]
        if key == "hbm_bytes":
            curves = [Curve("in use", record.points(key)), Curve("peak", record.points(PEAK), "c2")]
        found.append(line_chart(title, curves, kind=kind, from_zero=from_zero, marks=marks))
    return [chart for chart in found if chart is not None]


def step_marks(record: RunRecord, facts: RunFacts) -> list[Mark]:
    """Return the restarts and the skipped steps on the axis of steps."""
    restarts = [Mark(step, "restart", f"resumed at step {step:,}") for step, _ in facts.restarts]
    skips = [Mark(step, "skip", f"skipped step {step:,}: {why}") for step, why in sorted(record.skips.items())]
    return [*restarts, *skips]


def timeline(record: RunRecord, facts: RunFacts) -> LineChart | None:
    """Return the steps over the wall time, with restarts and skipped steps. None if the run has one record only."""
    start = start_seconds(record)
    rows = [row for row in record.metrics if isinstance(row.get("unix_seconds"), int | float)]
    if start is None or len(rows) < 2:
        return None
    points = [(row["unix_seconds"] - start, row["step"]) for row in rows]
    if points[0][0] > 0:
        points.insert(0, (0.0, 0))  # the time before the first step
    steps = [step for _, step in points]

    def reached(step: int) -> float:
        return points[min(bisect_left(steps, step), len(points) - 1)][0]

    marks = []
    for step, seconds in facts.restarts:
        # Runs of older versions did not record when they were resumed: the next step is the nearest time.
        marks.append(Mark(reached(step + 1) if seconds is None else seconds, "restart", f"resumed at step {step:,}"))
    for step, why in sorted(record.skips.items()):
        seconds = reached(step)
        marks.append(Mark(seconds, "skip", f"skipped step {step:,}: {why}"))
    return line_chart("Step", [Curve("step", points)], kind="step", x_kind="time", marks=marks, from_zero=True)
