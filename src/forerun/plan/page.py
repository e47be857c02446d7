"""A plan as one HTML page that needs nothing else: no network, no script; light and dark, phone and desk.

Whatever comes from the job or from the user's files is escaped.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape
from importlib import resources
from importlib.metadata import PackageNotFoundError, version

from forerun import __version__
from forerun.config.load import dump
from forerun.config.schema import Job
from forerun.plan import ledger
from forerun.plan.charts import Point, Segment, colour, legend, scatter, stacked_bar
from forerun.plan.figures import (
    doubt_notes,
    gib_text,
    hours_text,
    range_text,
    rate_text,
    seconds_text,
    step_text,
    usd_text,
)
from forerun.plan.machine import Machine, machine_of
from forerun.plan.money import Bill, Offer, Tariff, assumption_rows, bill_of
from forerun.plan.question import Impossible
from forerun.plan.report import NO_GPUS, price_notes
from forerun.plan.step_time import HIGH, LIMITS, LOW
from forerun.plan.verdict import Verdict
from forerun.units import GIB, Usd

MOST_OVER = 1.6  # a bar ends here, in limits, however large the job
# The colours of the ledger; what is small everywhere, and what is not in this list, is told as the rest.
MEMORY_PARTS = (
    "weights",
    "optimizer",
    ledger.GRADIENTS,
    ledger.ACTIVATIONS,
    ledger.LOSS,
    ledger.GATHERED,
    ledger.WORKING,
    ledger.OPTIMIZER,
    ledger.KERNELS,
)
REST, SMALL = "rest", 0.01
HEADS = ("slice", "mesh", "fits", "peak, GiB", "step", "tokens/s", "MFU, limit", "hours", "on demand", "spot")
SPOT_HEADS = (
    "slice",
    "hours on spot",
    "preemptions",
    "more time",
    "steps lost each",
    "checkpoint.every",
    "checkpoint",
    "written in all",
)

Rows = Sequence[tuple[Verdict, Bill | None]]


def page(
    job: Job,
    verdicts: Sequence[Verdict],
    tariff: Tariff,
    title: str,
    notes: Sequence[str] = (),
    impossible: Sequence[Impossible] = (),
) -> str:
    """Return the complete page. `notes` are lines about the comparison, such as what was left out."""
    notes = [*(one.text for one in impossible), *notes]
    rows = [(v, bill_of(v, tariff)) for v in verdicts]
    today = datetime.date.today().isoformat()
    fitting = any(v.fits for v in verdicts)
    body = [
        f"<h1>{escape(job.name)}</h1>",
        f'<p class="dim">{escape(title.removeprefix(f"{job.name}: "))}. Planned on {today}.</p>',
        f'<p class="answer{"" if fitting else " none"}">{escape(headline(rows, tariff))}</p>',
        *_table(rows, tariff, notes, impossible),
        *_memory(verdicts),
        *(_time(verdicts) if fitting else ()),
        *_money(rows),
        *_assumptions(rows, tariff),
        "<h2>The job</h2>",
        f"<details open><summary>Every value, defaults included</summary><pre>{escape(dump(job))}</pre></details>",
        f"<footer>forerun {escape(__version__)}{escape(_versions())}, {today}. {escape(NO_GPUS)}</footer>",
    ]
    return _frame(f"Plan of {job.name}", "\n".join(body))


def _frame(title: str, body: str) -> str:
    style = resources.files("forerun.plan").joinpath("page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def headline(rows: Rows, tariff: Tariff) -> str:
    """The answer in one sentence or two."""
    fitting = [(v, bill) for v, bill in rows if bill]
    if not fitting:
        nearest = max((v for v, _ in rows), key=lambda v: v.spare_bytes / v.limit_bytes)
        many = "The slice does not hold" if len(rows) == 1 else f"None of the {len(rows)} slices holds"
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
    text = f"Cheapest that fits: {_name(v)} {'on spot' if on_spot else 'on demand'} in {offer.price.zone}, "
    text += f"about {Usd(usd)} and {hours_text(hours.mid)} h"
    if on_spot and bill.on_demand:
        text += f" ({Usd(bill.on_demand.usd.mid)} and {hours_text(bill.hours.mid)} h on demand)"
    quick, quick_bill = min(fitting, key=lambda row: row[1].hours.mid)
    cost = f", {Usd(quick_bill.on_demand.usd.mid)} on demand" if quick_bill.on_demand else ", price not known"
    text += "."
    if quick is not v:
        text += f" Fastest: {_name(quick)}, about {hours_text(quick_bill.hours.mid)} h{cost}."
    if tariff.max_usd is not None and usd > tariff.max_usd:
        text += f" Nothing stays below ${tariff.max_usd:g}."
    return text


def _table(rows: Rows, tariff: Tariff, notes: Sequence[str], impossible: Sequence[Impossible]) -> Iterable[str]:
    yield "<h2>Slices</h2>"
    lines = [[_name(v), *_cells(v, bill, tariff)] for v, bill in rows]
    empty = ["–", '<span class="bad">no</span>', *["–"] * (len(HEADS) - 3)]
    lines += [[one.slice.name, *empty] for one in impossible]
    yield _cards(HEADS, lines, words=("mesh", "fits"))
    idle = [text for v, _ in rows if (text := v.question.idle_text())]
    doubts = doubt_notes([v for v, _ in rows])
    told = [*(line for line in price_notes(rows, tariff) if line != NO_GPUS), *doubts, *idle, *notes]
    yield '<ul class="notes">' + "".join(f"<li>{escape(line)}</li>" for line in told) + "</ul>"


def _cards(heads: Sequence[str], lines: Iterable[Sequence[str]], words: Sequence[str] = ()) -> str:
    """A table of figures, the first column a name; on a phone each line becomes a card. Cells are HTML, names not."""
    css = {head: "" if head in (heads[0], *words) else ' class="num"' for head in heads}
    head = "".join(f"<th{css[one]}>{one}</th>" for one in heads)
    body = ""
    for name, *cells in lines:
        more = zip(heads[1:], cells, strict=True)
        figures = "".join(f'<td{css[head]} data-label="{head}">{cell}</td>' for head, cell in more)
        body += f"<tr><td><b>{escape(name)}</b></td>{figures}</tr>"
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="plan cards">{table}</table></div>'


def _cells(v: Verdict, bill: Bill | None, tariff: Tariff) -> list[str]:
    short = f'<span class="bad">{gib_text(-v.spare_bytes)} GiB short</span>'
    return [
        escape(v.mesh),
        '<span class="good">yes</span>' if v.fits else short,
        f"{gib_text(v.memory.peak_bytes)} of {gib_text(v.limit_bytes)}",
        f"{step_text(v)}<br><small>{escape(range_text(v))}</small>" if v.step else "–",
        rate_text(v.tokens_per_second) if v.tokens_per_second else "–",
        f"{v.mfu:.0%}<br><small>{escape(v.step.limit)}</small>" if v.step and v.mfu is not None else "–",
        hours_text(bill.hours.mid) if bill else "–",
        _dollars(bill.on_demand if bill else None, tariff),
        _dollars(bill.spot if bill else None, tariff),
    ]


def _dollars(offer: Offer | None, tariff: Tariff) -> str:
    if offer is None:
        return "–"
    over = tariff.max_usd is not None and offer.usd.mid > tariff.max_usd
    amount = f'<span class="bad">${usd_text(offer.usd.mid)} over</span>' if over else f"${usd_text(offer.usd.mid)}"
    return f"{amount}<br><small>{escape(offer.price.zone)}</small>"


def _memory(verdicts: Sequence[Verdict]) -> Iterable[str]:
    parts = [name for name in MEMORY_PARTS if any(_share(v, name) > SMALL for v in verdicts)]
    full = min(MOST_OVER, max(1.0, *(v.memory.peak_bytes / v.limit_bytes for v in verdicts)))
    yield "<h2>Memory</h2>"
    yield "<p>What fills the HBM of one device at the peak of a step. The line is what the compiler allows.</p>"
    colours = {name: MEMORY_PARTS.index(name) for name in parts} | {REST: len(MEMORY_PARTS)}
    yield legend([*((name, colour(number)) for name, number in colours.items()), ("free", "var(--free)")])
    yield '<div class="bars">'
    for v in verdicts:
        sizes = {name: v.ledger.get(name, 0) for name in parts}
        sizes[REST] = v.memory.peak_bytes - sum(sizes.values())
        segments = [
            Segment(colours[name], size / v.limit_bytes, f"{name}: {gib_text(size)} GiB")
            for name, size in sizes.items()
        ]
        figure = f"{gib_text(v.memory.peak_bytes)} of {gib_text(v.limit_bytes)} GiB"
        if not v.fits:
            figure = f'<span class="bad">{figure}</span>'
        if v.memory.host_bytes >= GIB / 100:
            figure += f"<br><small>+ {gib_text(v.memory.host_bytes)} in host memory</small>"
        yield _bar(v, stacked_bar(segments, full, f"{_name(v)}: {', '.join(s.says for s in segments)}", 1.0), figure)
    yield "</div>"


def _share(v: Verdict, part: str) -> float:
    return v.ledger.get(part, 0) / v.limit_bytes


def _time(verdicts: Sequence[Verdict]) -> Iterable[str]:
    timed = [(v, v.step) for v in verdicts if v.step]
    colours = {name: number for number, name in enumerate(LIMITS)}  # a part has its colour on every page
    spent = {name for _, step in timed for name in step.parts_seconds}
    full = max(step.mid_seconds for _, step in timed)
    yield "<h2>Time of a step</h2><p>Where the seconds go. What is hidden behind other work is not counted.</p>"
    yield legend([(name, colour(number)) for name, number in colours.items() if name in spent])
    yield '<div class="bars">'
    for v, step in timed:
        segments = [
            Segment(colours[name], seconds, f"{name}: {seconds_text(seconds)}, {seconds / step.mid_seconds:.0%}")
            for name, seconds in sorted(step.parts_seconds.items(), key=lambda part: colours[part[0]])
        ]
        figure = f"{step_text(v)} <small>{escape(range_text(v))}</small>"
        yield _bar(v, stacked_bar(segments, full, f"{_name(v)}: {'; '.join(s.says for s in segments)}"), figure)
    yield "</div>"


def _bar(v: Verdict, drawing: str, figure: str) -> str:
    name = f'<div class="name">{escape(_name(v))}</div>'
    wide = f'<div class="bar wide">{drawing}</div>'
    return f'{name}{wide}<div class="figure">{figure}</div><div class="bar narrow">{drawing}</div>'


def _money(rows: Rows) -> Iterable[str]:
    points = []
    for v, bill in rows:
        if bill and bill.on_demand:
            points.append(Point(_name(v), bill.hours.mid, bill.on_demand.usd.mid, spot=False))
        if bill and bill.spot and bill.spot_hours:
            points.append(Point(_name(v), bill.spot_hours.mid, bill.spot.usd.mid, spot=True))
    if len({point.name for point in points}) > 1:
        yield "<h2>Time against money</h2>"
        yield "<p>The whole job. On a line stand the slices that no other beats in both time and money.</p>"
        yield legend([("on demand", "var(--c0)"), ("spot, preemptions and waiting included", "var(--c2)")])
        yield f"<figure>{scatter(points)}</figure>"
    if points:
        yield from _spot(rows)


def _spot(rows: Rows) -> Iterable[str]:
    yield "<h2>On spot, and on disk</h2>"
    yield _cards(SPOT_HEADS, ([_name(v), *_spot_cells(bill)] for v, bill in rows if bill))
    yield (
        '<p class="dim">The best interval is Young and Daly\'s: the root of 2 x the pause of a save x the mean time '
        "between preemptions. It is never shorter than a save takes to be written, and a short run saves ten times if "
        "that costs at most 1 % of its time.</p>"
    )


def _spot_cells(bill: Bill) -> list[str]:
    comes_through = bill.spot_hours is not None
    return [
        hours_text(bill.spot_hours.mid) if bill.spot_hours else "never ends",
        f"{bill.preemptions:.1f}" if comes_through else "–",
        f"{bill.spot_overhead:.0%}" if comes_through else "–",
        f"{bill.steps_lost_per_preemption:,.0f}",
        f"{bill.saves.every:,}<br><small>best: {bill.best_every:,}</small>",
        str(bill.saves.state_bytes),
        f"{bill.written_bytes}<br><small>{bill.kept_bytes} kept</small>",
    ]


def _assumptions(rows: Rows, tariff: Tariff) -> Iterable[str]:
    yield "<h2>Assumptions</h2>"
    yield (
        "<p>Memory is the TPU compiler's own report. The time of a step is simulated from the program that the "
        f"compiler scheduled; its range is {LOW:g} to {HIGH:g} of the middle. Hours and dollars rest on these:</p>"
    )
    yield _stack(("assumption", "value", "meaning", "source"), assumption_rows())
    offers = {o.price: None for _, bill in rows if bill for o in (bill.on_demand, bill.spot) if o}
    if offers:
        yield "<h3>Prices</h3>"
        prices = [
            (
                f"{p.generation}, {p.zone}",
                f"${p.usd_per_chip_hour_on_demand:g} on demand, "
                + (f"${p.usd_per_chip_hour_spot:g} spot" if p.usd_per_chip_hour_spot else "no spot price"),
                "USD per chip-hour",
                f"{p.source}, {p.date}",
            )
            for p in offers
        ]
        yield _stack(("chip and zone", "price", "unit", "source"), prices)
    yield "<h3>Chips, as the step time assumes them</h3>"
    chips = dict.fromkeys(v.question.slice.chip for v, _ in rows)
    machines = {chip.name: machine_of(chip) for chip in chips}
    heads = ("per device", *machines)
    figures = [
        (one.name, *(_figure(one.name, getattr(machine, one.name)) for machine in machines.values()))
        for one in fields(Machine)
    ]
    yield '<div class="scroll"><table class="plan"><thead><tr>'
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr></thead><tbody>"
    yield from (f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in figures)
    yield "</tbody></table></div>"


def _figure(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return f"{value * 1e6:g} µs"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:g}"


def _stack(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table whose rows become blocks on a phone."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f'<div class="scroll"><table class="stack"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(v: Verdict) -> str:
    return v.question.slice.name


def _versions() -> str:
    found = []
    for package in ("jax", "libtpu"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "".join(f", {one}" for one in found)
