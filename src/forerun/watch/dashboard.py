"""One frame of the terminal dashboard: lines of text that fit into a width and a height.

The frame uses rich, which forerun depends on anyway. textual would add a dependency for widgets, scrolling and a mouse,
and the dashboard needs none of them. `dashboard` is a pure function of the records, so that a test and a picture show
the same lines as the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunState, RunStatus
from forerun.safe_text import redact
from forerun.units import Bytes, Seconds
from forerun.watch.braille_chart import braille_chart
from forerun.watch.run_figures import RunFigures, figures_of

STYLES = {
    RunState.RUNNING: "bold green",
    RunState.WAITING: "bold yellow",
    RunState.SILENT: "bold red",
    RunState.STOPPED: "bold red",
    RunState.INTERRUPTED: "bold red",
    RunState.NOT_STARTED: "bold yellow",
    RunState.FINISHED: "bold cyan",
}
CHARTS = (
    ("loss", "loss", "cyan"),
    ("validation_loss", "validation", "yellow"),
    ("grad_norm", "grad norm", "magenta"),
    ("tokens_per_second", "tokens/s", "green"),
)
CHART_WIDTH = 38  # at least, with its labels
CHART_LINES = (3, 16)  # at least and at most, without its title
LABEL_WIDTH = 7
CELL_WIDTH = 26  # of a value with its name
SAMPLE_LINES = 3
MAX_HOSTS = 8


@dataclass(frozen=True)
class HostRow:
    """One host of hosts.json. See `forerun.supervise.leader.leader`."""

    name: str
    step: int | None
    lag: int | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    age_seconds: float | None


def host_rows(record: RunRecord) -> list[HostRow]:
    """Return the hosts of a run. Values of a wrong type count as unknown."""
    found = record.hosts.get("hosts")
    return [
        HostRow(
            name=str(host.get("name") or "?"),
            step=_whole(host.get("step")),
            lag=_whole(host.get("lag")),
            memory_bytes=_whole(host.get("memory_bytes")),
            memory_limit_bytes=_whole(host.get("memory_limit_bytes")),
            age_seconds=float(age) if isinstance(age := host.get("age_seconds"), int | float) else None,
        )
        for host in (found if isinstance(found, list) else [])
        if isinstance(host, dict)
    ]


def dashboard(record: RunRecord, status: RunStatus, width: int, height: int | None, footer: str = "") -> list[Text]:
    """Return the lines of a frame, at most `height` of them. None: as many as there are.

    A low terminal omits the sample first, then the charts, then the hosts.
    """
    figures = figures_of(record)
    head = [_title(record, status, figures, width), _bar(figures, status, width)]
    values = _values(figures, width)
    hosts = _hosts(record, width)
    sample = _sample(record, width)
    foot = [_line(Text(redact(footer), style="dim"), width)] if footer else []
    left = (10_000 if height is None else height) - len(head) - len(values) - len(foot)
    hosts = hosts if left >= len(hosts) else []
    left -= len(hosts)
    lines = min(CHART_LINES[1] if height is not None else 8, left - 2)  # without the title and the axis
    if lines - len(sample) >= CHART_LINES[0]:
        lines = min(lines, left - 2 - len(sample))
    else:
        sample = []
    charts = _charts(record, width, lines) if lines >= CHART_LINES[0] else []
    frame = [*head, *charts, *values, *hosts, *sample]
    if height is not None:
        frame = frame[: height - len(foot)]
    return [*frame, *foot]


def _title(record: RunRecord, status: RunStatus, figures: RunFigures, width: int) -> Text:
    line = Text.assemble((redact(record.name), "bold"), "  ", (f"● {status}", STYLES[status.state]))
    if status.age_seconds is not None and status.state is not RunState.SILENT:
        line.append(f"  {Seconds(status.age_seconds)} ago", style="dim")
    return _line(line, width)


def _bar(figures: RunFigures, status: RunStatus, width: int) -> Text:
    share = figures.share
    if share is None:
        return _line(Text(f"step {figures.step}", style="bold"), width)
    before = f"step {figures.step}/{figures.steps} {share:4.0%} "
    after = f" {figures.eta()}" if status.state in (RunState.RUNNING, RunState.WAITING) and figures.eta() else ""
    bar_width = max(0, width - len(before) - len(after))
    done = int(share * bar_width)
    bar = (("━" * done, "green"), ("─" * (bar_width - done), "grey37"))
    return _line(Text.assemble((before, "bold"), *bar, after), width)


def _values(figures: RunFigures, width: int) -> list[Text]:
    """Return the values in columns of equal width."""
    columns = max(1, width // CELL_WIDTH)
    cell_width = width // columns
    texts = figures.texts()
    lines = []
    for start in range(0, len(texts), columns):
        line = Text()
        for name, value in texts[start : start + columns]:
            cell = Text.assemble((f"{name} ", "dim"), (value, "bold"))
            cell.truncate(cell_width - 1, overflow="ellipsis")
            cell.pad_right(cell_width - cell.cell_len)
            line.append_text(cell)
        line.rstrip()
        lines.append(line)
    return lines


def _charts(record: RunRecord, width: int, height: int) -> list[Text]:
    """Return the charts of the first metrics that have two values, side by side."""
    known = [(title, style, points) for key, title, style in CHARTS if len(points := record.points(key)) > 1]
    known = known[: max(1, width // CHART_WIDTH)]
    if not known:
        return []
    each = width // len(known)
    columns = [_chart(title, style, points, each, height) for title, style, points in known]
    return [_line(Text.assemble(*parts), width) for parts in zip(*columns, strict=True)]


def _chart(title: str, style: str, points: Sequence[tuple[int, float]], width: int, height: int) -> list[Text]:
    """Return a title, the lines of a chart with its values at the left, and the steps at its ends."""
    chart = braille_chart(points, width - LABEL_WIDTH - 3, height)
    labels = {0: chart.high, height - 1: chart.low}
    lines = [Text(f"{'':{LABEL_WIDTH + 2}}{title}".ljust(width), style="bold")]
    for number, line in enumerate(chart.lines):
        value = labels.get(number)
        label = "" if value is None else f"{value:.4g}"
        lines.append(Text.assemble((f"{label:>{LABEL_WIDTH}} │", "dim"), (line, style), " "))
    first, last = str(points[0][0]), str(points[-1][0])
    axis = f"{'':{LABEL_WIDTH}} └{first}{last:─>{width - LABEL_WIDTH - 3 - len(first)}} "
    return [*lines, Text(axis, style="dim")]


def _hosts(record: RunRecord, width: int) -> list[Text]:
    """Return a table of the hosts. Of many hosts, it has those that are behind the most."""
    rows = host_rows(record)
    if not rows:
        return []
    shown = rows
    if len(rows) > MAX_HOSTS:
        shown = sorted(rows, key=lambda row: (-(row.lag or 0), -(row.age_seconds or 0.0)))[:MAX_HOSTS]
    name_width = min(28, max(12, *(len(row.name) for row in shown)))
    lines = [Text(f"{'host':<{name_width}} {'step':>8} {'lag':>5} {'memory':>21} {'age':>9}", style="bold")]
    for row in shown:
        memory = "" if row.memory_bytes is None else str(Bytes(row.memory_bytes))
        if memory and row.memory_limit_bytes:
            memory += f" / {Bytes(row.memory_limit_bytes)}"
        age = "" if row.age_seconds is None else str(Seconds(row.age_seconds))
        step, lag = ("" if value is None else str(value) for value in (row.step, row.lag))
        line = Text(f"{redact(row.name)[:name_width]:<{name_width}} {step:>8} {lag:>5} {memory:>21} {age:>9}")
        line.stylize("yellow" if row.lag else "")
        lines.append(line)
    if len(rows) > len(shown):
        lines.append(Text(f"and {len(rows) - len(shown)} other hosts", style="dim"))
    return [_line(line, width) for line in lines]


def _sample(record: RunRecord, width: int) -> list[Text]:
    """Return the first of the newest samples, in a few lines."""
    if not record.samples:
        return []
    step, samples = record.samples[-1]
    first = samples[0] if samples and isinstance(samples[0], dict) else {}
    prompt, text = (" ".join(redact(str(first.get(key) or "")).split(" ")) for key in ("prompt", "text"))
    content = Text.assemble((f"sample at step {step}: ", "dim"), (prompt, "bold"), text)
    content.plain = content.plain.replace("\n", "⏎")
    lines = [content[start : start + width] for start in range(0, len(content), width)]
    return [_line(line, width) for line in lines[:SAMPLE_LINES]]


def plain_line(record: RunRecord, status: RunStatus) -> str:
    """Return the newest values in one line, for outputs that are not terminals."""
    figures = figures_of(record)
    steps = f"/{figures.steps}" if figures.steps else ""
    values = [f"{name} {value}" for name, value in figures.texts()[:4]]
    parts = [redact(record.name), str(status), f"step {figures.step}{steps}", *values, figures.eta()]
    return "  ".join(part for part in parts if part)


def _line(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None
