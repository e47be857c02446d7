"""Line charts: curves over steps or time with axes, marks and a value display.

A chart is a value. The template `charts.html.jinja` draws it: the curves are SVG that stretches with the page, and the
labels are HTML, so that text has the same size on each screen. The script `charts.js` adds a crosshair; without it the
page shows the same curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.pages.svg import Point, downsample
from forerun.units import Bytes, Seconds, digits

Ticks = list[tuple[float, str]]
MOST = 5  # labels of an axis
SIZES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(1, 2, 5, 10, 20, 30),
    *(number * MINUTE for number in (1, 2, 5, 10, 20, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
)
UNITS = 100_000  # the size of the drawing in its own units; integers keep the markup short
LOG_RATIO = 50  # an axis is logarithmic by default if its largest value is this many times its smallest
MAX_MARKS = 200
MAX_LATEST = 3
X_TICKS = 7
SMALLEST_PERCENT_TOP = 0.01  # an axis of shares is not smaller, so that noise of 0.0001 % does not look large


@dataclass(frozen=True)
class Curve:
    """Points with a name and a CSS class for its colour. `dots` draws the points instead of a line."""

    name: str
    points: Sequence[Point]
    css: str = "c0"
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """An event on the horizontal axis. `css` is `restart` (a line) or `skip` (a short line at the bottom)."""

    x: float
    css: str
    title: str


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, with (share, text) for each label. `kind` is a format of `value_text`."""

    name: str
    kind: str
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """Return the position of a value: 0 is the start of the axis, 1 its end. Values outside are moved inside."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(1.0, max(0.0, (at - low) / ((high - low) or 1)))

    @property
    def data(self) -> str:
        """The axis for the script: low, high, log and kind."""
        return f"{self.low:.9g} {self.high:.9g} {int(self.log)} {self.kind}"


@dataclass(frozen=True)
class DrawnCurve:
    """A curve as SVG path data."""

    name: str
    css: str
    dots: bool
    path: str


@dataclass(frozen=True)
class LineChart:
    """A chart that the template `charts.html.jinja` draws.

    Attributes:
      title: what the chart shows.
      latest: the last value of each curve, as text.
      x: the horizontal axis.
      y: the vertical axis.
      curves: the curves.
      marks: (share, CSS class, title) of each mark.
      tall: whether the chart is the main one of its page.
    """

    title: str
    latest: str
    x: Axis
    y: Axis
    curves: tuple[DrawnCurve, ...]
    marks: tuple[tuple[float, str, str], ...]
    tall: bool = False


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    kind: str = "number",
    x_kind: str = "step",
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    top: float | None = None,
    log: bool | None = None,
    tall: bool = False,
) -> LineChart | None:
    """Return the chart of some curves, or None if they have no point.

    Args:
      title: what the chart shows.
      curves: the curves. Long ones are downsampled.
      kind: the format of the values: number, percent, rate, bytes, seconds or step.
      x_kind: the format of the horizontal axis: step or time (seconds since the start).
      marks: events on the horizontal axis.
      from_zero: start the vertical axis at 0.
      top: the largest value to show. Values above it are drawn at the top.
      log: whether the vertical axis is logarithmic. None: if the values differ by a large factor.
      tall: whether the chart is the main one of its page.
    """
    shown = [
        Curve(one.name, downsample([p for p in one.points if math.isfinite(p[1])]), one.css, one.dots) for one in curves
    ]
    shown = [one for one in shown if one.points]
    if not shown:
        return None
    xs = [x for one in shown for x, _ in one.points] + [mark.x for mark in marks]
    ys = [y for one in shown for _, y in one.points]
    x_axis = _x_axis(min(xs), max(xs), x_kind)
    y_axis = _y_axis(min(ys), max(ys) if top is None else min(top, max(ys)), kind, from_zero, log)
    step = max(1, -(-len(marks) // MAX_MARKS))
    return LineChart(
        title,
        _latest(shown, kind),
        x_axis,
        y_axis,
        tuple(DrawnCurve(one.name, one.css, one.dots, _path(one, x_axis, y_axis)) for one in shown),
        tuple((x_axis.share(mark.x), mark.css, mark.title) for mark in marks[::step]),
        tall,
    )


def _latest(curves: Sequence[Curve], kind: str) -> str:
    """Return the last value of each curve. For many curves this would not fit into a line."""
    texts = [value_text(one.points[-1][1], kind) for one in curves]
    if len(texts) > MAX_LATEST:
        return ""
    return (
        texts[0]
        if len(texts) == 1
        else " · ".join(f"{one.name} {text}" for one, text in zip(curves, texts, strict=True))
    )


def _x_axis(low: float, high: float, kind: str) -> Axis:
    if high <= low:
        low, high = low - 1, high + 1
    ticks = time_ticks(low, high, X_TICKS) if kind == "time" else round_ticks(low, high, kind, X_TICKS, whole=True)
    return _axis("time" if kind == "time" else "step", kind, low, high, False, ticks)


def _y_axis(low: float, high: float, kind: str, from_zero: bool, log: bool | None) -> Axis:
    if log is None:
        log = not from_zero and low > 0 and high >= LOG_RATIO * low
    if log:
        low, high = low / 1.15, high * 1.15
        return _axis("", kind, low, high, True, decade_ticks(low, high, kind))
    if kind == "percent" and from_zero:
        high = max(high, SMALLEST_PERCENT_TOP)
    space = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = (0.0 if from_zero else low - space if low < 0 or low > space else 0.0), high + space
    return _axis("", kind, low, high, False, round_ticks(low, high, kind))


def _axis(name: str, kind: str, low: float, high: float, log: bool, ticks: Ticks) -> Axis:
    bare = Axis(name, kind, low, high, log, ())
    return Axis(name, kind, low, high, log, tuple((bare.share(value), text) for value, text in ticks))


def _path(curve: Curve, x: Axis, y: Axis) -> str:
    """Return the path of a curve. A dot is a line of length zero with round ends."""
    places = [f"{round(UNITS * x.share(at))} {round(UNITS * (1 - y.share(value)))}" for at, value in curve.points]
    if curve.dots or len(places) == 1:
        return "".join(f"M{place}z" for place in places)
    return "M" + "L".join(places)


# ---- Labels of axes: round numbers and times, and the text of a value ----


def round_ticks(low: float, high: float, kind: str, most: int = MOST, *, whole: bool = False) -> Ticks:
    """Return at most `most` round values from `low` to `high`. `whole` allows only integers."""
    size = max((1 << 10 * power for power in range(6) if 1 << 10 * power <= high), default=1) if kind == "bytes" else 1
    step = _step((high - low) / size, most, whole) * size
    first = math.ceil(low / step - 1e-9)
    values = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, tick_text(value, step, kind)) for value in values]


def decade_ticks(low: float, high: float, kind: str, most: int = MOST) -> Ticks:
    """Return at most `most` round values on a logarithmic axis."""
    found: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [value for e in exponents for f in factors if low <= (value := f * 10.0**e) <= high]
        if len(found) <= most:
            break
    found = found[:: -(-len(found) // most)] if found else [low, high]
    return [(value, value_text(value, kind)) for value in found]


def time_ticks(low: float, high: float, most: int = MOST) -> Ticks:
    """Return at most `most` round times, in seconds."""
    span = high - low
    step = next((one for one in TIME_STEPS if span / one <= most), None)
    if step is None:
        step = DAY * max(1, round(_step(span / DAY, most, True)))
    first = math.ceil(low / step)
    return [(number * step, time_text(number * step)) for number in range(first, math.floor(high / step) + 1)]


def time_text(seconds: float) -> str:
    """Return a time since the start: 40 s, 12 min, 3 h 20 min, 2 d 4 h."""
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    for size, name, small, small_name in ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s")):
        if whole >= size:
            many, rest = divmod(whole, size)
            return f"{many} {name}" + (f" {rest // small} {small_name}" if rest // small else "")
    return f"{whole} s"


def tick_text(value: float, step: float, kind: str) -> str:
    """Return the label of a tick, with as many decimals as the distance of ticks needs."""
    if not value:
        return "0"
    if kind in ("bytes", "seconds"):
        return value_text(value, kind)
    if kind == "rate" or (kind == "step" and step >= 10_000):
        size, unit = next((one for one in SIZES if abs(value) >= one[0]), (1, ""))
        return f"{value / size:g}{unit}"
    if kind == "percent":
        return f"{100 * value:.{_places(100 * step)}f} %"
    if value and (abs(step) < 1e-4 or abs(value) >= 1e7):
        return _exponent(value)
    return f"{value:,.{_places(step)}f}"


def value_text(value: float, kind: str) -> str:
    """Return a value as text: percent (0..1), rate (per second), bytes, seconds, time, step or number."""
    if kind == "percent":
        return f"{100 * value:.1f} %"
    if kind == "bytes":
        return str(Bytes(round(value)))
    if kind == "seconds":
        return str(Seconds(value))
    if kind == "time":
        return time_text(value)
    if kind == "step":
        return f"{value:,.0f}"
    if kind == "rate":
        for size, unit in SIZES:
            if abs(value) >= size:
                return f"{digits(value / size, 3)}{unit}"
        return digits(value, 3)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return _exponent(value)
    return f"{value:,.4g}"


def _exponent(value: float) -> str:
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _places(step: float) -> int:
    """Return the decimals that distinguish multiples of `step`."""
    for places in range(8):
        if abs(round(step, places) - step) < 1e-9 * max(1.0, abs(step)):
            return places
    return 8


def _step(span: float, most: int, whole: bool) -> float:
    """Return a round distance of at most `most` ticks over `span`."""
    raw = span / most
    decade = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 2.5, 5, 10):
        step = factor * decade
        if step >= raw * (1 - 1e-9) and (not whole or (step >= 1 and step == round(step))):
            return step
    return 1.0 if whole else 10 * decade
