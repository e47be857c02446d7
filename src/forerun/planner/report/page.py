"""A plan as an HTML page: the values for the template `plan.html.jinja`."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.hardware.chips import Chip, chip_named
from forerun.pages.render import Cell, render
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.request import Impossible
from forerun.planner.cost.job_cost import JobCost, Offer, Tariff, assumption_rows, job_cost_of
from forerun.planner.report.charts import Point, memory_chart, money_chart, money_legend, time_chart
from forerun.planner.report.formatting import (
    attention_notes,
    doubt_notes,
    gib_text,
    hours_text,
    limit_text,
    places_text,
    range_notes,
    range_text,
    rate_text,
    step_text,
    unroll_notes,
    usd_text,
)
from forerun.planner.report.plan_notes import failure_notes, gpu_memory_note, place_text, price_notes
from forerun.planner.time.chip_model import ChipModel, chip_model_of
from forerun.planner.time.step_time import StepTime
from forerun.units import Usd
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
            *_plan_notes(rows, tariff),
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


def _plan_notes(rows: Rows, tariff: Tariff) -> list[str]:
    """Return the notes on the figures, which both pages have."""
    verdicts = [v for v, _ in rows]
    return [
        *price_notes(rows, tariff),
        *failure_notes(verdicts),
        *attention_notes(verdicts),
        *unroll_notes(verdicts),
        *doubt_notes(verdicts),
        *range_notes(verdicts),
    ]


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
            *_plan_notes(rows, tariff),
            *(one.text for one in impossible),
            *notes,
        ],
        memory=memory_chart(verdicts),
    )


def headline(rows: Rows, tariff: Tariff) -> str:
    """Return the result of the plan in one or two sentences: the cheapest and the fastest slice."""
    fitting = [(v, bill) for v, bill in rows if bill]
    if not fitting:
        nearest = max((v for v, _ in rows), key=lambda v: v.spare_bytes / v.limit_bytes)
        places = [v.question.slice for v, _ in rows]
        many = f"None of the {len(rows)} {places_text(places)} holds"
        if len(rows) == 1:
            many = f"The {places_text(places, one=True)} does not hold"
        return (
            f"{many} the job. The nearest is {_name(nearest)}, {gib_text(-nearest.spare_bytes)} GiB per device short."
        )
    offers = [(offer.usd.mid, v, bill, offer) for v, bill in fitting for offer in (bill.on_demand, bill.spot) if offer]
    if not offers:
        fastest = min(fitting, key=lambda row: row[1].hours.mid)
        return f"Fastest: {_name(fastest[0])}, about {hours_text(fastest[1].hours.mid)} h. No price is known."
    usd, v, bill, offer = min(offers, key=lambda one: one[0])
    on_spot = offer is bill.spot
    hours = bill.spot_hours if on_spot and bill.spot_hours else bill.hours
    text = f"Cheapest that fits: {_name(v)} {'on spot' if on_spot else 'on demand'} in {place_text(offer)}, "
    text += f"about {Usd(usd)} and {hours_text(hours.mid)} h"
    if on_spot and bill.on_demand:
        text += f" ({Usd(bill.on_demand.usd.mid)} and {hours_text(bill.hours.mid)} h on demand)"
    quick, quick_bill = min(fitting, key=lambda row: row[1].hours.mid)
    cost = f", {Usd(quick_bill.on_demand.usd.mid)} on demand" if quick_bill.on_demand else ", price not known"
    text += "."
    if quick is not v:
        text += f" Fastest: {_name(quick)}, about {hours_text(quick_bill.hours.mid)} h{cost}."
    if tariff.max_usd is not None and usd > tariff.max_usd:
        text += f" All {places_text(v.question.slice for v, _ in rows)} cost more than ${tariff.max_usd:g}."
    return text


def _slice(v: FitResult, bill: JobCost | None, tariff: Tariff) -> Row:
    return {
        "slice": _name(v),
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
            points.append(Point(_name(v), bill.hours.mid, bill.on_demand.usd.mid, spot=False, gpu=gpu))
        if bill and bill.spot and bill.spot_hours:
            points.append(Point(_name(v), bill.spot_hours.mid, bill.spot.usd.mid, spot=True, gpu=gpu))
    return points


def _spot(v: FitResult, bill: JobCost) -> Row:
    return {
        "slice": _name(v),
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


def _name(v: FitResult) -> str:
    return v.question.slice.name


def _versions() -> str:
    found = [f"forerun {__version__}"]
    for package in ("jax", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
