"""A plan as an HTML page: the values for the template `plan.html.jinja`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.hardware.chips import Chip, chip_named
from forerun.pages.render import Cell, render
from forerun.pages.svg import Element, Plot, Segment, both_widths, log_scale, log_ticks, stacked_bar
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import Impossible
from forerun.planner.cost.job_cost import JobCost, Offer, Tariff, assumption_rows, job_cost_of
from forerun.planner.memory import ACTIVATIONS, GATHERED, GRADIENTS, KERNELS, LOSS, OPTIMIZER, WORKING
from forerun.planner.report.formatting import (
    gib_text,
    hours_text,
    limit_text,
    places_text,
    range_text,
    rate_text,
    seconds_text,
    step_text,
    usd_text,
)
from forerun.planner.report.plan_notes import figure_notes, gpu_memory_note, place_text
from forerun.planner.report.remedies import nearest
from forerun.planner.time.chip_model import ChipModel, chip_model_of
from forerun.planner.time.step_time import LIMITS, StepTime
from forerun.units import GIB, Usd
from forerun.version import __version__

Row = Mapping[str, object]
ASSUMPTION_HEADS = ("assumption", "value", "meaning", "source")

Rows = Sequence[tuple[FitResult, JobCost | None]]


def page(
    job: Job,
    verdicts: Sequence[FitResult],
    tariff: Tariff,
    title: str,
    notes: Sequence[str] = (),
    impossible: Sequence[Impossible] = (),
) -> str:
    """Return the complete page as HTML.

    Args:
        job: The job, whose YAML the page shows.
        verdicts: The results of all slices, in the order of the rows.
        tariff: Zone, prices and budget.
        title: The heading; the name of the job at its start is removed.
        notes: Lines about the comparison, for example about omitted slices.
        impossible: Slices on which the job cannot run.
    """
    rows = [(v, job_cost_of(v, tariff)) for v in verdicts]
    idle = [text for v in verdicts if (text := v.question.idle_text())]
    platforms = {v.question.slice.platform for v in verdicts}
    points = _points(rows)
    return render(
        "plan.html.jinja",
        page_title=f"Plan of {job.name}",
        name=job.name,
        title=title.removeprefix(f"{job.name}: "),
        today=datetime.date.today().isoformat(),
        answer=headline(rows, tariff),
        fits=any(v.fits for v in verdicts),
        slices=[*(_slice(v, bill, tariff) for v, bill in rows), *map(_impossible_slice, impossible)],
        notes=[
            *figure_notes(rows, tariff),
            *idle,
            *(one.text for one in impossible),
            *notes,
        ],
        memory=memory_chart(verdicts),
        time=time_chart(verdicts),
        money_legend=money_legend(points),
        money=money_chart(points) if len({point.name for point in points}) > 1 else None,
        spot=[_spot(v, bill) for v, bill in rows if bill] if points else None,
        assumptions=[dict(zip(ASSUMPTION_HEADS, row, strict=True)) for row in assumption_rows()],
        prices=_prices(rows),
        places=places_text(v.question.slice for v in verdicts).capitalize(),
        gpu_memory=gpu_memory_note() if "gpu" in platforms else None,
        chips=_chips(verdicts),
        gpus=_gpus(verdicts),
        ranges=_ranges(verdicts),
        job=dump(job),
        versions=_versions(),
    )


def compact_page(
    job: Job,
    verdicts: Sequence[FitResult],
    tariff: Tariff,
    title: str,
    notes: Sequence[str] = (),
    impossible: Sequence[Impossible] = (),
) -> str:
    """Return the answer, the slices and the memory as HTML for a notebook."""
    rows = [(v, job_cost_of(v, tariff)) for v in verdicts]
    return render(
        "plan_compact.html.jinja",
        name=job.name,
        title=title.removeprefix(f"{job.name}: "),
        answer=headline(rows, tariff),
        fits=any(v.fits for v in verdicts),
        slices=[*(_slice(v, bill, tariff) for v, bill in rows), *map(_impossible_slice, impossible)],
        notes=[
            *figure_notes(rows, tariff),
            *(one.text for one in impossible),
            *notes,
        ],
        memory=memory_chart(verdicts),
    )


def headline(rows: Rows, tariff: Tariff) -> str:
    """Return the result of the plan in one or two sentences: the cheapest and the fastest slice."""
    fitting = [(v, bill) for v, bill in rows if bill]
    if not fitting:
        near = nearest([v for v, _ in rows])
        places = [v.question.slice for v, _ in rows]
        many = f"None of the {len(rows)} {places_text(places)} holds"
        if len(rows) == 1:
            many = f"The {places_text(places, one=True)} does not hold"
        return f"{many} the job. The nearest is {near.slice_name}, {gib_text(-near.spare_bytes)} GiB per device short."
    offers = [(offer.usd.mid, v, bill, offer) for v, bill in fitting for offer in (bill.on_demand, bill.spot) if offer]
    if not offers:
        fastest = min(fitting, key=lambda row: row[1].hours.mid)
        return f"Fastest: {fastest[0].slice_name}, about {hours_text(fastest[1].hours.mid)} h. No price is known."
    usd, v, bill, offer = min(offers, key=lambda one: one[0])
    on_spot = offer is bill.spot
    hours = bill.spot_hours if on_spot and bill.spot_hours else bill.hours
    text = f"Cheapest that fits: {v.slice_name} {'on spot' if on_spot else 'on demand'} in {place_text(offer)}, "
    text += f"about {Usd(usd)} and {hours_text(hours.mid)} h"
    if on_spot and bill.on_demand:
        text += f" ({Usd(bill.on_demand.usd.mid)} and {hours_text(bill.hours.mid)} h on demand)"
    quick, quick_bill = min(fitting, key=lambda row: row[1].hours.mid)
    cost = f", {Usd(quick_bill.on_demand.usd.mid)} on demand" if quick_bill.on_demand else ", price not known"
    text += "."
    if quick is not v:
        text += f" Fastest: {quick.slice_name}, about {hours_text(quick_bill.hours.mid)} h{cost}."
    if tariff.max_usd is not None and usd > tariff.max_usd:
        text += f" All {places_text(v.question.slice for v, _ in rows)} cost more than ${tariff.max_usd:g}."
    return text


def _slice(v: FitResult, bill: JobCost | None, tariff: Tariff) -> Row:
    return {
        "slice": v.slice_name,
        "mesh": v.mesh,
        "fits": Cell("yes", css="good") if v.fits else Cell(f"{gib_text(-v.spare_bytes)} GiB short", css="bad"),
        "peak, GiB": f"{gib_text(v.memory.peak_bytes)} of {gib_text(v.limit_bytes)}",
        "step": Cell(step_text(v), range_text(v)) if v.step else None,
        "tokens/s": rate_text(v.tokens_per_second) if v.tokens_per_second else None,
        "MFU, limit": Cell(f"{v.mfu:.0%}", limit_text(v)) if v.step and v.mfu is not None else None,
        "hours": hours_text(bill.hours.mid) if bill else None,
        "on demand": _dollars(bill.on_demand, tariff) if bill else None,
        "spot": _dollars(bill.spot, tariff) if bill else None,
    }


def _impossible_slice(one: Impossible) -> Row:
    return {"slice": one.slice.name, "fits": Cell("no", css="bad")}


def _dollars(offer: Offer | None, tariff: Tariff) -> Cell | None:
    if offer is None:
        return None
    over = tariff.max_usd is not None and offer.usd.mid > tariff.max_usd
    return Cell(f"${usd_text(offer.usd.mid)}{' over' if over else ''}", place_text(offer), "bad" if over else None)


def _points(rows: Rows) -> list[Point]:
    points = []
    for v, bill in rows:
        gpu = v.question.slice.platform == "gpu"
        if bill and bill.on_demand:
            points.append(Point(v.slice_name, bill.hours.mid, bill.on_demand.usd.mid, spot=False, gpu=gpu))
        if bill and bill.spot and bill.spot_hours:
            points.append(Point(v.slice_name, bill.spot_hours.mid, bill.spot.usd.mid, spot=True, gpu=gpu))
    return points


def _spot(v: FitResult, bill: JobCost) -> Row:
    return {
        "slice": v.slice_name,
        "hours on spot": hours_text(bill.spot_hours.mid) if bill.spot_hours else "never finishes",
        "preemptions": f"{bill.preemptions:.1f}" if bill.spot_hours else None,
        "more time": f"{bill.spot_overhead:.0%}" if bill.spot_hours else None,
        "steps lost each": f"{bill.steps_lost_per_preemption:,.0f}",
        "checkpoint.every": Cell(f"{bill.saves.every:,}", f"best: {bill.best_every:,}"),
        "checkpoint": bill.saves.state_bytes,
        "written in total": Cell(str(bill.written_bytes), f"{bill.kept_bytes} kept"),
    }


def _prices(rows: Rows) -> list[Row]:
    offers = {o.price: o for _, bill in rows if bill for o in (bill.on_demand, bill.spot) if o}
    spot = {p: f"${p.usd_per_chip_hour_spot:g} spot" if p.usd_per_chip_hour_spot else "no spot price" for p in offers}
    return [
        {
            "chip and zone": f"{p.generation}, {place_text(offer)}",
            "price": f"${p.usd_per_chip_hour_on_demand:g} on demand, {spot[p]}",
            "unit": f"USD per {'GPU' if chip_named(p.generation).gpu else 'chip'}-hour",
            "source": f"{p.source}, {p.date}",
        }
        for p, offer in offers.items()
    ]


def _ranges(verdicts: Sequence[FitResult]) -> str:
    """Return the widest range of the step times of each platform, relative to the middle."""
    found: dict[str, list[StepTime]] = {}
    for v in verdicts:
        if v.step:
            found.setdefault(v.question.slice.platform.upper(), []).append(v.step)
    return " and ".join(
        f"{'' if len({(one.low_factor, one.high_factor) for one in steps}) == 1 else 'within '}"
        f"{min(round(one.low_factor, 2) for one in steps):g} to {max(round(one.high_factor, 2) for one in steps):g} "
        f"of the middle on {name}s"
        for name, steps in found.items()
    )


def _gpus(verdicts: Sequence[FitResult]) -> list[Row]:
    """Return the data-sheet figures of the GPUs, one row per figure."""
    gpus = {chip.name: chip for v in verdicts if (chip := v.question.slice.chip).gpu}
    figures: dict[str, Callable[[Chip], float | None]] = {
        "bf16, FLOP/s": lambda chip: chip.bf16_flops,
        "memory, B/s": lambda chip: chip.hbm_bytes_per_second,
        "NVLink or PCIe one way, B/s": lambda chip: chip.link_bytes_per_second,
        "network one way, B/s": lambda chip: chip.gpu.network_bytes_per_second if chip.gpu else None,
        "memory of the device, B": lambda chip: chip.gpu.memory_bytes if chip.gpu else None,
        "usable memory, B": lambda chip: chip.usable_bytes,
    }
    return [
        {"per GPU": name, **{one: _figure(name, value) if (value := of(gpus[one])) else None for one in gpus}}
        for name, of in figures.items()
        if gpus
    ]


def _chips(verdicts: Sequence[FitResult]) -> list[Row]:
    """Return the assumptions about the TPU chips, one row per figure."""
    chips = {chip.name: chip for v in verdicts if (chip := v.question.slice.chip).gpu is None}
    if not chips:
        return []
    machines = {name: chip_model_of(chip) for name, chip in chips.items()}
    names = [one.name for one in fields(ChipModel)]
    figures = [{chip: _figure(name, getattr(one, name)) for chip, one in machines.items()} for name in names]
    return [{"per device": name, **row} for name, row in zip(names, figures, strict=True)]


def _figure(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{value * 1e6:g} µs"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:g}"


def _versions() -> str:
    found = [f"forerun {__version__}"]
    for package in ("jax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


MAX_LIMITS = 1.6  # largest width of a memory bar relative to the limit, even if the job needs more
# A part has the same colour on every page. Other parts, and parts that are small on all slices, are shown as the rest.
MEMORY_PARTS = (*("weights", "optimizer", GRADIENTS, ACTIVATIONS, LOSS, GATHERED, WORKING, OPTIMIZER, KERNELS),)
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
    name = v.slice_name
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
