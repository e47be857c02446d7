"""The drawings of the page as inline SVG. Colours are CSS variables, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from forerun.plan.figures import hours_text, usd_text

WIDE, NARROW = (1000, 420), (360, 340)
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 16, 44
CHARACTER_WIDTH, LINE_HEIGHT = 7.2, 15


@dataclass(frozen=True)
class Segment:
    colour: int
    size: float
    says: str  # for the mouse


def colour(number: int) -> str:
    """One of the ten of page.css."""
    return f"var(--c{number})"


def legend(parts: Iterable[tuple[str, str]]) -> str:
    """(words, CSS colour)"""
    items = "".join(f'<li><i style="background:{css}"></i>{escape(words)}</li>' for words, css in parts)
    return f'<ul class="legend">{items}</ul>'


def stacked_bar(segments: Sequence[Segment], full: float, says: str, limit: float | None = None) -> str:
    """One bar; `full` is what its whole width stands for, `limit` a line across it with free room before it."""
    drawn = []
    if limit is not None:
        drawn.append(_box(0, limit / full, "var(--free)", "free"))
    begin = 0.0
    for one in segments:
        end = min(begin + one.size, full)
        if end > begin:
            drawn.append(_box(begin / full, end / full, colour(one.colour), one.says))
        begin += one.size
    if limit is not None:
        over = begin > limit
        css = "var(--bad)" if over else "var(--ink)"
        x = min(100 * limit / full, 99.8)
        drawn.append(f'<line x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="24" stroke="{css}" stroke-width="2.5"/>')
    return f'<svg role="img" aria-label="{escape(says)}"><title>{escape(says)}</title>{"".join(drawn)}</svg>'


def _box(begin: float, end: float, css: str, says: str) -> str:
    place = f'x="{100 * begin:.2f}%" width="{100 * (end - begin):.2f}%" y="3" height="18"'
    return f'<rect {place} style="fill:{css};stroke:var(--paper);stroke-width:1"><title>{escape(says)}</title></rect>'


@dataclass(frozen=True)
class Point:
    name: str
    hours: float
    usd: float
    spot: bool

    @property
    def says(self) -> str:
        way = "spot" if self.spot else "on demand"
        return f"{self.name} {way}: {hours_text(self.hours)} h, ${usd_text(self.usd)}"


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both time and money, fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.hours, p.usd)):
        if not front or point.usd < front[-1].usd:
            front.append(point)
    return front


def scatter(points: Sequence[Point]) -> str:
    """Time against money, twice: for wide and for narrow screens, as text must not shrink with the picture."""
    return "".join(
        f'<div class="{css}">{_Scatter(points, size).drawing()}</div>'
        for css, size in (("wide", WIDE), ("narrow", NARROW))
    )


class _Scatter:
    """Both axes are logarithmic."""

    def __init__(self, points: Sequence[Point], size: tuple[int, int]) -> None:
        self.points = points
        self.width, self.height = size
        self.hours = _bounds([p.hours for p in points])
        self.usd = _bounds([p.usd for p in points])

    def x(self, hours: float) -> float:
        return LEFT + _share(hours, self.hours) * (self.width - LEFT - RIGHT)

    def y(self, usd: float) -> float:
        return self.height - BOTTOM - _share(usd, self.usd) * (self.height - TOP - BOTTOM)

    def drawing(self) -> str:
        parts = [*self._axes()]
        for spot in (False, True):
            front = pareto([p for p in self.points if p.spot == spot])
            if len(front) > 1:
                path = " ".join(f"{self.x(p.hours):.1f},{self.y(p.usd):.1f}" for p in front)
                parts.append(f'<polyline class="front{" spot" if spot else ""}" points="{path}"/>')
        for p in self.points:
            place = f'cx="{self.x(p.hours):.1f}" cy="{self.y(p.usd):.1f}" r="6"'
            parts.append(
                f'<circle class="dot{" spot" if p.spot else ""}" {place}><title>{escape(p.says)}</title></circle>'
            )
        parts += self._names()
        says = "time against money: " + "; ".join(p.says for p in self.points)
        box = f'viewBox="0 0 {self.width} {self.height}"'
        return f'<svg {box} role="img" aria-label="{escape(says)}">{"".join(parts)}</svg>'

    def _axes(self) -> Iterable[str]:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        for tick in _ticks(self.hours, 8 if self.width > 500 else 4):
            x = self.x(tick)
            yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:,g} h</text>'
        for tick in _ticks(self.usd, 7):
            y = self.y(tick)
            yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">${tick:,g}</text>'
        yield f'<text class="tick" x="{right}" y="{bottom + 36}" text-anchor="end">hours for the whole job</text>'

    def _names(self) -> Iterable[str]:
        """Beside each dot where there is room; a name without room is left to the mouse and the table."""
        taken = [(self.x(p.hours) - 7, self.y(p.usd) - 7, self.x(p.hours) + 7, self.y(p.usd) + 7) for p in self.points]
        important = [*pareto([p for p in self.points if not p.spot]), *pareto([p for p in self.points if p.spot])]
        for p in dict.fromkeys((*important, *self.points)):
            for anchor, x, y in self._places(p, p in important):
                box = self._text_box(p.name, anchor, x, y)
                if self._inside(box) and not any(_overlap(box, other) for other in taken):
                    taken.append(box)
                    yield f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(p.name)}</text>'
                    break

    def _inside(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        return left >= LEFT and top >= 0 and right <= self.width - 2 and bottom <= self.height - BOTTOM

    def _places(self, p: Point, on_line: bool) -> list[tuple[str, float, float]]:
        """(text-anchor, x, y), the best first. A front falls to the right: above it the place is free."""
        x, y = self.x(p.hours), self.y(p.usd)
        above = [("start", x + 6, y - 10), ("middle", x, y - 12)]
        beside = [("start", x + 10, y + 4), ("end", x - 10, y + 4)]
        below = [("middle", x, y + 22), ("start", x + 8, y + 18), ("end", x - 8, y + 18)]
        return [*above, *below, *beside] if on_line else [*beside, *above, *below]

    def _text_box(self, text: str, anchor: str, x: float, y: float) -> tuple[float, float, float, float]:
        width = len(text) * CHARACTER_WIDTH
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        return left, y - LINE_HEIGHT + 4, left + width, y + 4


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the ends of an axis, with air."""
    low, high = math.log10(min(values)), math.log10(max(values))
    air = max(0.08 * (high - low), 0.15)
    return low - air, high + air


def _share(value: float, bounds: tuple[float, float]) -> float:
    return (math.log10(value) - bounds[0]) / (bounds[1] - bounds[0])


def _ticks(bounds: tuple[float, float], most: int) -> list[float]:
    """Round numbers: 1-2-5 of each decade, or fewer where that is too many, or more where it is too few."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [
            float(f"{step * 10.0**decade:.6g}")
            for decade in range(math.floor(bounds[0]), math.ceil(bounds[1]) + 1)
            for step in steps
            if bounds[0] <= math.log10(step) + decade <= bounds[1]
        ]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]
