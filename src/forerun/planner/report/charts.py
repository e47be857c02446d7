"""Charts of a plan: memory, time of a step, and time against cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.pages.render import Cell
from forerun.pages.svg import Element, Plot, Segment, both_widths, log_scale, log_ticks, stacked_bar
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.memory import breakdown
from forerun.planner.report.formatting import gib_text, hours_text, range_text, seconds_text, step_text, usd_text
from forerun.planner.time.step_time import LIMITS
from forerun.units import GIB

MAX_LIMITS = 1.6  # largest width of a memory bar relative to the limit, even if the job needs more
# A part has the same colour on every page. Other parts, and parts that are small on all slices, are shown as the rest.
MEMORY_PARTS = (
    *("weights", "optimizer", breakdown.GRADIENTS, breakdown.ACTIVATIONS, breakdown.LOSS),
    *(breakdown.GATHERED, breakdown.WORKING, breakdown.OPTIMIZER, breakdown.KERNELS),
)
REST, SMALL = "rest", 0.01


@dataclass(frozen=True)
class BarChart:
    """Bars as (name, SVG element, figure), and a legend as (CSS class, text, share)."""

    legend: Sequence[tuple[str, str, str]]
    bars: Sequence[tuple[str, Element, Cell]]


def memory_chart(verdicts: Sequence[FitResult]) -> BarChart:
    """Return a chart of the memory contents of one device at the peak, relative to the limit."""
    parts = [name for name in MEMORY_PARTS if any(v.ledger.get(name, 0) / v.limit_bytes > SMALL for v in verdicts)]
    full = min(MAX_LIMITS, max(1.0, *(v.memory.peak_bytes / v.limit_bytes for v in verdicts)))
    colours = {name: f"c{MEMORY_PARTS.index(name)}" for name in parts} | {REST: f"c{len(MEMORY_PARTS)}"}
    rows = []
    for v in verdicts:
        sizes = {name: v.ledger.get(name, 0) for name in parts}
        sizes[REST] = v.memory.peak_bytes - sum(sizes.values())
        texts = {name: f"{name}: {gib_text(size)} GiB" for name, size in sizes.items()}
        segments = [Segment(size / v.limit_bytes, colours[name], texts[name]) for name, size in sizes.items()]
        host = v.memory.host_bytes
        figure = Cell(
            f"{gib_text(v.memory.peak_bytes)} of {gib_text(v.limit_bytes)} GiB",
            f"+ {gib_text(host)} in host memory" if host >= GIB / 100 else "",
            None if v.fits else "bad",
        )
        rows.append(_bar(v, segments, full, figure, limit=1.0))
    return BarChart([*_legend(colours), ("free", "free", "")], rows)


def time_chart(verdicts: Sequence[FitResult]) -> BarChart:
    """Return a chart of the parts of a step's time, for slices that the job fits."""
    timed = [(v, v.step) for v in verdicts if v.step]
    full = max((step.mid_seconds for _, step in timed), default=1.0)
    parts = [name for name in LIMITS if any(name in step.parts_seconds for _, step in timed)]
    colours = {name: f"c{number}" for number, name in enumerate(LIMITS) if name in parts}
    rows = []
    for v, step in timed:
        spent = {name: step.parts_seconds[name] for name in parts if name in step.parts_seconds}
        segments = [
            Segment(seconds, colours[name], f"{name}: {seconds_text(seconds)}, {seconds / step.mid_seconds:.0%}")
            for name, seconds in spent.items()
        ]
        rows.append(_bar(v, segments, full, Cell(step_text(v), range_text(v))))
    return BarChart(_legend(colours), rows)


def _bar(
    v: FitResult, segments: Sequence[Segment], full: float, figure: Cell, limit: float | None = None
) -> tuple[str, Element, Cell]:
    name = v.question.slice.name
    label = f"{name}: {'; '.join(one.title for one in segments)}"
    return name, stacked_bar(segments, full, label, limit), figure


def _legend(colours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    return [(css, name, "") for name, css in colours.items()]


@dataclass(frozen=True)
class Point:
    """Time and cost of the complete job on one slice, on demand or on spot."""

    name: str
    hours: float
    usd: float
    spot: bool
    gpu: bool = False

    @property
    def title(self) -> str:
        way = "spot" if self.spot else "on demand"
        return f"{self.name} {way}: {hours_text(self.hours)} h, ${usd_text(self.usd)}"


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both time and cost, fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.hours, p.usd)):
        if not front or point.usd < front[-1].usd:
            front.append(point)
    return front


def money_legend(points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Return the legend of the chart of time against cost: circles are TPUs, squares are GPUs."""
    platforms = [(gpu, "GPU" if gpu else "TPU") for gpu in (False, True) if any(p.gpu == gpu for p in points)]
    both = len(platforms) > 1
    entries = []
    for spot, way in ((False, "on demand"), (True, "spot, with preemptions and waiting")):
        for gpu, platform in platforms:
            if any(p.spot == spot and p.gpu == gpu for p in points):
                css = f"{'spot' if spot else 'demand'}{'' if gpu else ' round'}"
                entries.append((css, f"{platform} {way}" if both else way, ""))
    return entries


def money_chart(points: Sequence[Point]) -> dict[str, Plot]:
    """Return a chart of time against cost, for wide and for narrow screens. Both axes are logarithmic."""
    x, y = log_scale([p.hours for p in points]), log_scale([p.usd for p in points])
    fronts = {css: pareto([p for p in points if p.spot == bool(css)]) for css in ("", " spot")}
    ordered = list(dict.fromkeys((*fronts[""], *fronts[" spot"], *points)))

    def draw(size: tuple[int, int]) -> Plot:
        plot = Plot(size, x, y, f"time against money: {'; '.join(p.title for p in points)}")
        hours, dollars = log_ticks(x, 8 if size[0] > 500 else 4), log_ticks(y, 7)
        plot.x_axis({tick: f"{tick:,g} h" for tick in hours}, "hours for the complete job")
        plot.y_axis({tick: f"${tick:,g}" for tick in dollars})
        for css, front in fronts.items():
            if len(front) > 1:
                plot.line([(p.hours, p.usd) for p in front], f"front{css}")
        for p in points:
            plot.point(p.hours, p.usd, "dot spot" if p.spot else "dot", p.title, square=p.gpu)
        plot.names([(p.name, p.hours, p.usd) for p in ordered], above=sum(map(len, fronts.values())))
        return plot

    return both_widths(draw, 420)
