"""Charts as SVG: a stacked bar, and a plot with axes, bars, lines, points and labels.

Elements have CSS classes instead of colours, so that charts follow the stylesheet in light and dark mode.
ElementTree writes the markup, so texts and attributes are always escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from forerun.pages.render import stylesheet

LEFT, RIGHT, TOP, BOTTOM = 62, 20, 30, 46  # margins of a plot
CHARACTER_WIDTH, LINE_HEIGHT, DOT = 7.2, 15, 7
BAR_TOP, BAR_HEIGHT = 3, 18

MAX_POINTS = 1000  # of a curve

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


class Element:
    """An SVG element. A template includes it as markup."""

    def __init__(self, tag: str, text: str = "", title: str = "", **attributes: object) -> None:
        """`css` sets the class, numbers are rounded, and `_` in a name becomes `-`. A tooltip shows `title`."""
        values = {("class" if name == "css" else name.replace("_", "-")): v for name, v in attributes.items()}
        shown = {name: f"{v:.1f}" if isinstance(v, float) else str(v) for name, v in values.items()}
        self.node = ElementTree.Element(tag, shown)
        self.node.text = text
        if title:
            self.add("title", title)

    def add(self, tag: str, text: str = "", title: str = "", **attributes: object) -> None:
        """Append a new element."""
        self.node.append(Element(tag, text, title, **attributes).node)

    def __html__(self) -> str:
        return ElementTree.tostring(self.node, encoding="unicode")

    def file_text(self) -> str:
        """Return the element as the text of an SVG file, with the stylesheet inside."""
        self.node.set("xmlns", "http://www.w3.org/2000/svg")
        style = ElementTree.Element("style")
        style.text = stylesheet()
        self.node.insert(0, style)
        return self.__html__() + "\n"


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its size, its CSS class, and the text of its tooltip."""

    size: float
    css: str
    title: str


def stacked_bar(segments: Sequence[Segment], full: float, label: str, limit: float | None = None) -> Element:
    """Return a bar whose full width represents `full`, with a line at `limit` and free space up to it."""
    svg = Element("svg", css="stacked", role="img", aria_label=label)

    def box(begin: float, end: float, css: str, title: str) -> None:
        place = {"x": f"{100 * begin / full:.2f}%", "width": f"{100 * (end - begin) / full:.2f}%"}
        svg.add("rect", title=title, css=css, **place, y=BAR_TOP, height=BAR_HEIGHT)

    if limit is not None:
        box(0, limit, "free", "free")
    begin = 0.0
    for one in segments:
        end = min(begin + one.size, full)
        if end > begin:
            box(begin, end, one.css, one.title)
        begin += one.size
    if limit is not None:
        x = f"{min(100 * limit / full, 99.8):.2f}%"
        svg.add("line", css="limit over" if begin > limit else "limit", x1=x, x2=x, y1=0, y2=2 * BAR_TOP + BAR_HEIGHT)
    return svg


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`. If `log` is set, both are base-10 logarithms."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of `value` on the axis: 0 is its start, 1 its end."""
        return ((math.log10(value) if self.log else value) - self.low) / ((self.high - self.low) or 1)


def log_scale(values: Sequence[float]) -> Scale:
    """Return a logarithmic axis that contains `values` and some space around them."""
    low, high = math.log10(min(values)), math.log10(max(values))
    space = max(0.08 * (high - low), 0.15)
    return Scale(low - space, high + space, log=True)


class Plot(Element):
    """A plot with two axes. Methods take values on the axes, except where their docstrings mention pixels."""

    def __init__(self, size: tuple[int, int], x: Scale, y: Scale, label: str) -> None:
        width, height = size
        super().__init__("svg", css="plot", viewBox=f"0 0 {width} {height}", role="img", aria_label=label)
        self.x_scale, self.y_scale, self.width = x, y, width
        self.right, self.bottom = width - RIGHT, height - BOTTOM

    def x(self, value: float) -> float:
        """Return the pixel of a value on the horizontal axis."""
        return LEFT + self.x_scale.share(value) * (self.right - LEFT)

    def y(self, value: float) -> float:
        """Return the pixel of a value on the vertical axis."""
        return self.bottom - self.y_scale.share(value) * (self.bottom - TOP)

    def text(self, text: str, x: float, y: float, css: str = "tick", anchor: str = "start") -> None:
        """Write `text` at a pixel."""
        if text:
            self.add("text", text, css=css, x=x, y=y, text_anchor=anchor)

    def x_axis(self, ticks: Mapping[Any, str], name: str = "", anchor: str = "middle", grid: bool = True) -> None:
        """Draw labels below the plot, and the lines of a grid or short marks."""
        for value, text in ticks.items():
            x = self.x(value)
            self.add("line", css="grid", x1=x, x2=x, y1=self.bottom, y2=TOP if grid else self.bottom + 5)
            self.text(text, x, self.bottom + 18, anchor=anchor)
        self.text(name, self.right, self.bottom + 38, anchor="end")

    def y_axis(self, ticks: Mapping[Any, str], name: str = "") -> None:
        """Draw labels to the left of the plot and the lines of a grid."""
        for value, text in ticks.items():
            y = self.y(value)
            self.add("line", css="grid", x1=LEFT, x2=self.right, y1=y, y2=y)
            self.text(text, LEFT - 8, y + 4, anchor="end")
        self.text(name, LEFT, TOP - 12)

    def bar(self, begin: float, end: float, value: float, css: str, title: str) -> None:
        """Draw a bar from 0 to `value`. A bar that is not empty is at least 2 pixels high."""
        x, width = self.x(begin) + 1, max(1.0, self.x(end) - self.x(begin) - 2)
        height = max(self.bottom - self.y(value), 2.0 if value else 0.0)
        self.add("rect", title=title, css=css, x=x, y=self.bottom - height, width=width, height=height)

    def line(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """Draw a line through `points`."""
        self.add("polyline", css=css, points=" ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points))

    def marker(self, value: float, name: str) -> None:
        """Draw a vertical line with a name beside its top."""
        x = self.x(value)
        left = x > self.width / 2
        self.add("line", css="marker", x1=x, x2=x, y1=8, y2=self.bottom)
        self.text(name, x - 8 if left else x + 8, 18, "marker-name", "end" if left else "start")

    def point(self, x: float, y: float, css: str, title: str, square: bool = False) -> None:
        """Draw a dot, or a square."""
        left, top, half = self.x(x), self.y(y), DOT - 1.5
        if square:
            side = 2 * half
            self.add("rect", title=title, css=css, x=left - half, y=top - half, width=side, height=side)
        else:
            self.add("circle", title=title, css=css, cx=left, cy=top, r=DOT - 1)

    def names(self, points: Sequence[tuple[str, float, float]], above: int) -> None:
        """Write names next to points where space is free. Other names are visible only as tooltips.

        The first `above` points are on a line that falls to the right. Their names are placed above the line first.
        """
        taken = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in ((self.x(x), self.y(y)) for _, x, y in points)]
        for number, (name, at_x, at_y) in enumerate(points):
            x, y = self.x(at_x), self.y(at_y)
            over = [("start", x + 6, y - 10), ("middle", x, y - 12)]
            beside = [("start", x + 10, y + 4), ("end", x - 10, y + 4)]
            below = [("middle", x, y + 22), ("start", x + 8, y + 18), ("end", x - 8, y + 18)]
            for anchor, left, base in [*over, *below, *beside] if number < above else [*beside, *over, *below]:
                box = _text_box(name, anchor, left, base)
                inside = box[0] >= LEFT and box[1] >= 0 and box[2] <= self.width - 2 and box[3] <= self.bottom
                if inside and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    self.text(name, left, base, "name", anchor)
                    break


def both_widths(draw: Callable[[tuple[int, int]], Plot], wide: int) -> dict[str, Plot]:
    """Return a plot for wide screens, `wide` pixels high, and one for narrow screens.

    Two plots are needed because text must not shrink with the plot.
    """
    return {"wide": draw((1000, wide)), "narrow": draw((360, min(wide, 340)))}


def log_ticks(scale: Scale, most: int) -> list[float]:
    """Return at most `most` round numbers on a logarithmic axis."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [
            float(f"{step * 10.0**decade:.6g}")
            for decade in range(math.floor(scale.low), math.ceil(scale.high) + 1)
            for step in steps
            if scale.low <= math.log10(step) + decade <= scale.high
        ]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def round_top(most: int) -> int:
    """Return a round number that is at least `most` and whose half is also round."""
    decade = 1
    while decade * 100 < most:
        decade *= 10
    steps = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 30, 40, 50, 60, 80, 100)
    return next(step * decade for step in steps if step * decade >= most)


def _text_box(text: str, anchor: str, x: float, y: float) -> Box:
    width = len(text) * CHARACTER_WIDTH
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return left, y - LINE_HEIGHT + 4, left + width, y + 4


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def downsample(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` of the points, in their order.

    The first and the last point stay. The others are divided into buckets of equal size, and each bucket keeps its
    lowest and its highest point. A spike of one step therefore stays visible.

    Args:
      points: (x, y) in order of x.
      most: the number of points to keep, 4 or more.
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    buckets = (most - 2) // 2
    kept = [points[0]]
    for number in range(buckets):
        begin, end = number * len(inner) // buckets, (number + 1) * len(inner) // buckets
        places = range(begin, end)
        low, high = min(places, key=lambda at: inner[at][1]), max(places, key=lambda at: inner[at][1])
        kept += [inner[at] for at in sorted({low, high})]
    return [*kept, points[-1]]


def loss_curve(losses: Sequence[Point], validation: Sequence[Point] = ()) -> Plot:
    """Return the chart of (step, loss) points, with the validation losses as dots."""
    line = downsample([(step, loss) for step, loss in losses if math.isfinite(loss)])
    shown = [loss for _, loss in (*line, *validation)]
    low, high = min(shown), max(shown)
    space = max(0.08 * (high - low), 1e-3)
    first, last = line[0][0], max(line[-1][0], line[0][0] + 1)
    plot = Plot((680, 260), Scale(first, last), Scale(low - space, high + space), "loss by step")
    steps = sorted({first, round((first + last) / 2), last})
    plot.x_axis({step: f"{step:,}" for step in steps}, "step")
    plot.y_axis({value: f"{value:.3g}" for value in (low, (low + high) / 2, high)}, "loss")
    plot.line(line, "front")
    for step, loss in validation:
        plot.point(step, loss, "c2", f"validation, step {step:,}: {loss:.4f}")
    return plot
