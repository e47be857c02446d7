"""A run as an HTML page: its charts, and the other values for the template `run_report.html.jinja`.

`write_report` writes it as `report.html` to the folder of a run that ends or stops.
"""

from __future__ import annotations

import datetime
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.pages.line_chart import Curve, LineChart, Mark, line_chart, time_text
from forerun.pages.render import render
from forerun.pages.svg import Segment, stacked_bar
from forerun.report.differences import differences_from_defaults
from forerun.report.run_facts import RunFacts, StepCost, run_facts, start_seconds
from forerun.report.run_files import Row
from forerun.report.run_record import RunRecord, record_of
from forerun.reporter import Reporter
from forerun.run_folder.run_folder import RunFolder
from forerun.safe_text import redact
from forerun.units import MIB, Bytes, Count, Seconds, Usd
from forerun.version import __version__

MAX_SAMPLES, MAX_ROWS = 20, 100  # steps with samples, and rows of a table, that a page shows
MAX_TEXT = 2000  # characters of a sample
FILE = "report.html"
# A run that is asked to stop may have only seconds left. Above this size, its metrics take longer than one to read.
MAX_STOPPED_BYTES = 16 * MIB
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
STATUS_CSS = {"finished": "good", "running": "accent"}
# names and colours of the categories of wall time, in the order of the bar
TIME_NAMES = {
    "useful": ("useful steps", "c3"),
    "startup": ("startup", "c0"),
    "compile": ("compile", "c1"),
    "restore": ("restore", "c8"),
    "saves": ("saves", "c4"),
    "data_wait": ("data wait", "c2"),
    "validation": ("validation", "c6"),
    "samples": ("samples", "c7"),
    "restarts": ("restarts", "c5"),
    "replayed": ("replayed steps", "over"),
    "other": ("other", "c9"),
}


def page(record: RunRecord, facts: RunFacts | None = None, *, live_script: str = "") -> str:
    """Return the complete page of a run. It loads nothing from the network, and is readable without its script.

    Args:
      record: the records of the run.
      facts: its results, by default those of `record`.
      live_script: the script that keeps the page up to date. The server of such a page sends its own policy.
    """
    facts = facts or run_facts(record)
    return render(
        "run_report.html.jinja",
        page_title=f"Run {record.name}",
        name=record.name,
        subtitle=subtitle(record),
        status=str(facts.status),
        status_css=STATUS_CSS.get(facts.status.state, "warn"),
        figures=figures(record, facts),
        loss=loss_chart(record, facts),
        loss_unit=record.summary.get("loss_unit") or "",
        has_validation=bool(record.points("validation_loss")),
        metrics=metric_charts(record, facts),
        timeline=timeline(record, facts),
        restarts=len(facts.restarts),
        skips=[{"step": f"{step:,}", "reason": why} for step, why in list(sorted(record.skips.items()))[:MAX_ROWS]],
        skip_count=len(record.skips),
        goodput=goodput_bar(facts),
        prediction=prediction_rows(facts.cost),
        price_note=price_note(facts.cost),
        samples=shown_samples(record),
        sample_count=len(record.samples),
        hosts=_hosts(record),
        differences=[
            {"key": key, "value": value, "default": default}
            for key, value, default in differences_from_defaults(record.job)
        ],
        job=dump(record.job),
        environment=environment(record),
        exports=_exports(record),
        version=__version__,
        live_script=live_script,
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def write_report(folder: RunFolder, job: Job, reporter: Reporter, *, stopped: bool = False) -> None:
    """Write the page of a run to its folder. A failure is only reported to `reporter`: the run itself is complete.

    Args:
      folder: the folder of the run.
      job: the job of the run.
      reporter: receives the reason if the page cannot be written.
      stopped: whether the run was asked to stop. The page of a long run is then not written.
    """
    try:
        if stopped and folder.metrics.stat().st_size > MAX_STOPPED_BYTES:
            return
        atomic_write(folder.path / FILE, page(record_of(str(folder.path), folder, job)))
    except Exception as error:  # a page must never fail a run that trained for days
        reporter.warn(f"{folder.path / FILE} was not written: {type(error).__name__}: {error}")


def subtitle(record: RunRecord) -> str:
    """Return the model, its size, the devices and the location in one line."""
    summary, device = record.summary, record.summary.get("device") or {}
    model = record.job.model
    parts = [model.name or (f"{model.layers} layers of width {model.embed}" if model.layers else "own dimensions")]
    if parameters := summary.get("parameters"):
        trained = summary.get("trainable_parameters")
        also = f", {Count(trained)} trainable" if trained and trained != parameters else ""
        parts.append(f"{Count(parameters)} parameters{also}")
    if device:
        parts.append(f"{device.get('count')} x {device.get('kind')}")
    return " · ".join([*parts, redact(record.location)])


def figures(record: RunRecord, facts: RunFacts) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the main results, in the order of the header."""
    best, cost = facts.best_validation, facts.cost
    total = f"of {facts.steps:,}" if facts.steps else ""
    usd = cost.usd(facts.wall_seconds)
    share = facts.useful_share
    return [
        ("steps", f"{facts.step:,}", total),
        ("final loss", _loss(facts.final_loss), f"first {_loss(facts.first_loss)}" if facts.first_loss else ""),
        ("best validation", _loss(best and best[1]), f"at step {best[0]:,}" if best else "not measured"),
        (
            "wall time",
            str(Seconds(facts.wall_seconds)) if facts.wall_seconds else "–",
            f"{100 * share:.1f} % useful steps" if share is not None else "",
        ),
        (
            "tokens per second",
            f"{facts.tokens_per_second:,.0f}" if facts.tokens_per_second else "–",
            f"{100 * facts.mfu:.1f} % MFU" if facts.mfu else "MFU not known",
        ),
        (
            "cost",
            str(Usd(usd)) if usd is not None else "–",
            "list price, on demand" if usd is not None else cost.reason,
        ),
        *_data_reads(facts.data_reads),
    ]


def _data_reads(reads: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Yield the reads of data in a bucket, if there were any, with those that had to be repeated."""
    if not reads:
        return
    damaged, failed = reads.get("damaged_blocks", 0), reads.get("failed_requests", 0)
    remark = f"{damaged:,} damaged blocks and {failed:,} failed requests repeated" if damaged or failed else ""
    yield "data requests", f"{reads.get('requests', 0):,}, {Bytes(reads.get('read_bytes', 0))}", remark


def goodput_bar(facts: RunFacts) -> dict[str, Any] | None:
    """Return the bar of the wall time and its legend. The shares add up to 100 %."""
    if not facts.seconds or not facts.wall_seconds:
        return None
    known = {name: facts.seconds[name] for name in TIME_NAMES if facts.seconds.get(name)}
    known |= {name: value for name, value in facts.seconds.items() if name not in TIME_NAMES and value}
    total = sum(known.values())
    shares = share_texts(list(known.values()))
    parts = [
        (*TIME_NAMES.get(name, (name, "c9")), seconds, share)
        for (name, seconds), share in zip(known.items(), shares, strict=True)
    ]
    segments = [Segment(seconds, css, f"{words}: {Seconds(seconds)}, {share}") for words, css, seconds, share in parts]
    return {
        "bar": stacked_bar(segments, total, "where the wall time went"),
        "legend": [(css, words, share) for words, css, _, share in parts],
        "rows": [{"time in": words, "seconds": Seconds(s), "share": share} for words, _, s, share in parts],
    }


def share_texts(values: Sequence[float]) -> list[str]:
    """Return the shares of values in percent, with one decimal. The printed shares add up to 100.0 %."""
    exact = [1000 * value / sum(values) for value in values]
    tenths = [int(one) for one in exact]
    order = sorted(range(len(exact)), key=lambda at: tenths[at] - exact[at])  # the largest remainder first
    for at in order[: 1000 - sum(tenths)]:
        tenths[at] += 1
    return [f"{one / 10:.1f} %" for one in tenths]


def prediction_rows(cost: StepCost) -> list[Row]:
    """Return the rows of the comparison of predicted and measured times and costs."""
    predicted, measured = cost.predicted_seconds, cost.measured_seconds
    off = f"{100 * (measured / predicted - 1):+.1f} %" if predicted and measured else None
    usd = [cost.all_steps_usd(seconds) for seconds in (predicted, measured)]
    not_predicted = "not predicted for CPU" if cost.reason.endswith("CPU") else "not predicted"
    return [
        {
            "": "step time",
            "predicted": str(Seconds(predicted)) if predicted else not_predicted,
            "measured": str(Seconds(measured)) if measured else None,
            "measured against predicted": off,
        },
        {
            "": f"cost of {cost.steps:,} steps",
            "predicted": str(Usd(usd[0])) if usd[0] is not None else None,
            "measured": str(Usd(usd[1])) if usd[1] is not None else cost.reason or None,
            "measured against predicted": off if usd[0] is not None and usd[1] is not None else None,
        },
    ]


def price_note(cost: StepCost) -> str:
    """Return the origin of the price, or why there is none."""
    price = cost.price
    if price is None:
        return f"Cost: {cost.reason}." if cost.reason else ""
    return (
        f"Price: ${price.usd_per_chip_hour_on_demand:g} per chip-hour on demand, {price.generation} in {price.place}, "
        f"{price.date}. {cost.chips:g} chips. Your own price may differ."
    )


def shown_samples(record: RunRecord, most: int = MAX_SAMPLES) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (step, its (prompt, text) pairs), the newest first. Of many steps, some in equal distances are shown."""
    found = record.samples
    if len(found) > most:
        found = [found[number * (len(found) - 1) // (most - 1)] for number in range(most)]
    return [
        (f"{step:,}", [(_cut(one.get("prompt")), _cut(one.get("text"))) for one in texts if isinstance(one, dict)])
        for step, texts in reversed(found)
    ]


def environment(record: RunRecord) -> list[Row]:
    """Return the devices, the mesh and the versions as rows of a table."""
    summary, device = record.summary, record.summary.get("device") or {}
    rows: list[tuple[str, Any]] = []
    if device:
        chip = f", chip {device['chip']}" if device.get("chip") else ""
        rows.append(("devices", f"{device.get('count')} x {device.get('kind')} ({device.get('platform')}{chip})"))
    rows += [(key, summary[key]) for key in ("mesh", "program") if summary.get(key)]
    if "compile_cached" in summary:
        rows.append(("compiled program", "from the cache" if summary["compile_cached"] else "compiled in this run"))
    versions = summary.get("versions")
    rows += [(str(name), value) for name, value in versions.items()] if isinstance(versions, dict) else []
    return [{"": name, "value": str(value)} for name, value in rows]


def _exports(record: RunRecord) -> list[Row]:
    return [
        {
            "folder": redact(str(one.get("folder"))),
            "format": one.get("format"),
            "step": one.get("step"),
            "size": str(Bytes(one["bytes"])) if isinstance(one.get("bytes"), int) else None,
            "written": _date(one.get("unix_seconds")),
        }
        for one in record.exports[-MAX_ROWS:]
    ]


def _hosts(record: RunRecord) -> list[Row]:
    return [
        {
            "host": one.get("name"),
            "step": one.get("step"),
            "lag": one.get("lag"),
            "memory": str(Bytes(one["memory_bytes"])) if one.get("memory_bytes") else None,
            "last sign": time_text(one["age_seconds"]) if one.get("age_seconds") is not None else None,
        }
        for one in record.hosts.get("hosts") or ()
    ]


def _date(seconds: object) -> str | None:
    if not isinstance(seconds, int | float):
        return None
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _cut(text: object) -> str:
    words = str(text or "")
    return words if len(words) <= MAX_TEXT else words[:MAX_TEXT] + " …"


# ---- Charts ----


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
            curves = [Curve("in use", record.points(key)), Curve("peak", record.points("hbm_peak_bytes"), "c2")]
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

    marks = [Mark(seconds, "restart", f"resumed at step {step:,}") for step, seconds in facts.restarts]
    marks += [
        Mark(reached(step), "skip", f"skipped step {step:,}: {why}") for step, why in sorted(record.skips.items())
    ]
    return line_chart("Step", [Curve("step", points)], kind="step", x_kind="time", marks=marks, from_zero=True)
