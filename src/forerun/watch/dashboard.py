"""One frame of the terminal dashboard: lines of text that fit into a width and a height.

The frame uses rich, which forerun depends on anyway. textual would add a dependency for widgets, scrolling and a mouse,
and the dashboard needs none of them. `dashboard` is a pure function of the records, so that a test and a picture show
the same lines as the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from forerun.report.run_record import RunRecord
from forerun.report.run_status import RunState, RunStatus, seconds_per_step
from forerun.safe_text import redact
from forerun.track.goodput import goodput_of
from forerun.units import Bytes, Count, Seconds

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


def dashboard(record: RunRecord, status: RunStatus, width: int, height: int | None, footer: str = "") -> list[Text]:
    """Return the lines of a frame, at most `height` of them. None: as many as there are.

    A low terminal omits the sample first, then the charts, then the hosts.
    """
    head = [_title(record, status, width), _bar(record, status, width)]
    values = _values(record, width)
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


def _title(record: RunRecord, status: RunStatus, width: int) -> Text:
    line = Text.assemble((redact(record.name), "bold"), "  ", (f"● {status}", STYLES[status.state]))
    if status.age_seconds is not None and status.state is not RunState.SILENT:
        line.append(f"  {Seconds(status.age_seconds)} ago", style="dim")
    return _line(line, width)


def _bar(record: RunRecord, status: RunStatus, width: int) -> Text:
    step, steps = record.step, record.job.steps
    if not steps:
        return _line(Text(f"step {step}", style="bold"), width)
    share = min(1.0, step / steps)
    eta = eta_text(record) if status.state in (RunState.RUNNING, RunState.WAITING) else ""
    before, after = f"step {step}/{steps} {share:4.0%} ", f" {eta}" if eta else ""
    bar_width = max(0, width - len(before) - len(after))
    done = int(share * bar_width)
    bar = (("━" * done, "green"), ("─" * (bar_width - done), "grey37"))
    return _line(Text.assemble((before, "bold"), *bar, after), width)


def eta_text(record: RunRecord) -> str:
    """Return the remaining time of a run as a text, or "" if it is unknown."""
    steps, step_seconds = record.job.steps, seconds_per_step(record)
    if not steps or step_seconds is None or record.step >= steps:
        return ""
    return f"eta {Seconds((steps - record.step) * step_seconds)}"


def newest_values(record: RunRecord) -> list[tuple[str, str]]:
    """Return (name, newest value) of each metric that the run has recorded, the most important first."""

    def text(key: str, form: str) -> str:
        value = record.newest(key)
        return "" if value is None else format(value, form)

    validation, losses = text("validation_loss", ".4f"), [loss for _, loss in record.points("validation_loss")]
    if losses and min(losses) < losses[-1]:
        validation += f" (best {min(losses):.4f})"
    speed, goodput = record.newest("tokens_per_second"), goodput_of(record.events)
    memory, peak = (record.newest(key) for key in ("hbm_bytes", "hbm_peak_bytes"))
    memory_text = "" if memory is None else str(Bytes(memory))
    if memory_text and peak is not None:
        memory_text += f" (peak {Bytes(peak)})"
    starts = sum(event.get("event") == "start" for event in record.events)
    values = [
        ("loss", text("loss", ".4f")),
        ("validation", validation),
        ("tokens/s", "" if speed is None else str(Count(round(speed)))),
        ("MFU", text("mfu", ".1%")),
        ("lr", text("lr", ".2e")),
        ("grad norm", text("grad_norm", ".3g")),
        ("data wait", text("wait_share", ".1%")),
        ("memory", memory_text),
        ("goodput", text("goodput", ".1%") if goodput is None else f"{goodput.share:.1%}"),
        ("restarts", str(starts - 1) if starts else ""),
        ("skipped", str(len(record.skips))),
    ]
    return [(name, value) for name, value in values if value]


def _values(record: RunRecord, width: int) -> list[Text]:
    """Return the newest values in columns of equal width."""
    columns = max(1, width // CELL_WIDTH)
    cell_width = width // columns
    values = newest_values(record)
    lines = []
    for start in range(0, len(values), columns):
        line = Text()
        for name, value in values[start : start + columns]:
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
    """Return a table of the hosts in hosts.json. Of many hosts, it has those that are behind the most."""
    rows = record.hosts.get("hosts") or []
    if not rows:
        return []
    shown = rows
    if len(rows) > MAX_HOSTS:
        shown = sorted(rows, key=lambda row: (-(row.get("lag") or 0), -(row.get("age_seconds") or 0.0)))[:MAX_HOSTS]
    names = [redact(row.get("name") or "?") for row in shown]
    name_width = min(28, max(12, *map(len, names)))
    lines = [Text(f"{'host':<{name_width}} {'step':>8} {'lag':>5} {'memory':>21} {'age':>9}", style="bold")]
    for name, row in zip(names, shown, strict=True):
        step, lag, memory, limit, age = (
            row.get(key) for key in ("step", "lag", "memory_bytes", "memory_limit_bytes", "age_seconds")
        )
        memory_text = "" if memory is None else str(Bytes(memory)) + (f" / {Bytes(limit)}" if limit else "")
        step_text, lag_text = ("" if value is None else str(value) for value in (step, lag))
        age_text = "" if age is None else str(Seconds(age))
        line = Text(f"{name[:name_width]:<{name_width}} {step_text:>8} {lag_text:>5} {memory_text:>21} {age_text:>9}")
        line.stylize("yellow" if lag else "")
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
    steps = f"/{record.job.steps}" if record.job.steps else ""
    values = [f"{name} {value}" for name, value in newest_values(record)[:4]]
    parts = [redact(record.name), str(status), f"step {record.step}{steps}", *values, eta_text(record)]
    return "  ".join(part for part in parts if part)


def _line(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


# ---- Charts of braille characters, each of which has two columns and four rows of dots ----

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column
_BLANK = 0x2800

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class BrailleChart:
    """Lines of braille characters, and the values at the bottom and at the top. None: there are no values."""

    lines: tuple[str, ...]
    low: float | None
    high: float | None


def braille_chart(points: Points, width: int, height: int, *, joined: bool = True) -> BrailleChart:
    """Return a chart of `height` lines of `width` characters with (x, y) points, ascending by x.

    Points that share a column of dots are drawn as their mean. The lowest value is at the bottom, the highest at the
    top. Values that are not finite are omitted. If `joined`, lines connect the points.
    """
    shown = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    cells = [[0] * width for _ in range(height)]
    dots = _columns(shown, 2 * width)
    levels = _levels(dots, 4 * height)
    for (x, y), (next_x, next_y) in pairwise(levels) if joined else ():
        for column in range(x, next_x + 1):
            share = (column - x) / (next_x - x)
            # Between two columns, the line also covers the rows of its slope, so that it has no gaps.
            ends = (share - 0.5 / (next_x - x), share + 0.5 / (next_x - x))
            low, high = sorted(round(y + (next_y - y) * min(1.0, max(0.0, end))) for end in ends)
            for row in range(low, high + 1):
                _set(cells, column, row)
    for x, y in levels:
        _set(cells, x, y)
    lines = tuple("".join(chr(_BLANK + cell) for cell in line) for line in cells)
    values = [value for _, value in dots]
    return BrailleChart(lines, min(values, default=None), max(values, default=None))


def _columns(points: Points, count: int) -> list[tuple[int, float]]:
    """Return the mean value of each column of dots that has points."""
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    scale = (count - 1) / (last - first) if last > first else 0.0
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = round((x - first) * scale)
        total, number = sums.get(column, (0.0, 0))
        sums[column] = (total + y, number + 1)
    return [(column, total / number) for column, (total, number) in sorted(sums.items())]


def _levels(dots: Sequence[tuple[int, float]], count: int) -> list[tuple[int, int]]:
    """Return the row of dots of each column, counted from the top."""
    low, high = min((y for _, y in dots), default=0.0), max((y for _, y in dots), default=0.0)
    scale = (count - 1) / (high - low) if high > low else 0.0
    middle = 0 if high > low else count // 2  # a constant is a line in the middle
    return [(x, middle or count - 1 - round((y - low) * scale)) for x, y in dots]


def _set(cells: list[list[int]], x: int, y: int) -> None:
    cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
