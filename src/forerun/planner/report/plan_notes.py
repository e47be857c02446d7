"""Notes below the table of a plan: units, prices and checkpoints. The terminal and the HTML page share them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.hardware.device_memory import memory_share
from forerun.hardware.prices import GOOGLE_CLOUD
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.cost.failures import DAY_SECONDS, failures_of
from forerun.planner.cost.job_cost import WASTE, JobCost, Offer, Tariff
from forerun.planner.report.formatting import UNCERTAIN, seconds_text
from forerun.units import Seconds

OFTEN_DAYS = 30  # a run that fails more often than this has a note about it
WIDE = 1.3  # a range that ends here or beyond gets a note with its main cause
SHORT_LIST = 4  # values that a note lists one by one


def memory_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return notes on the memory: its unit, its source, and the limit of GPUs."""
    places = [v.question.slice for v in verdicts]
    chips = sorted({place.chip.name for place in places if place.chip.devices_per_chip == 2})
    platforms = sorted({place.platform for place in places}, reverse=True)
    unit = " or ".join({"tpu": "chip", "gpu": "GPU"}[platform] for platform in platforms)
    source = (
        f"{platforms[0].upper()} compiler's report" if len(platforms) == 1 else "report of each platform's compiler"
    )
    per = f"device; a chip of {' and '.join(chips)} is two devices" if chips else unit
    notes = [f"GiB per {per}. Memory is from the {source}."]
    if "gpu" in platforms:
        notes.append(gpu_memory_note())
    return notes


def gpu_memory_note() -> str:
    """Return how the usable memory of a GPU is chosen."""
    share = memory_share()
    source = f"set by {share.variable}" if share.variable else "the share that forerun train reserves"
    return f"Usable GPU memory is {share.share:.0%} of the device's, {source}."


def provider_of(offer: Offer | None) -> str | None:
    """Return the provider of an offer, or None without an offer."""
    return offer.price.provider if offer else None


def save_notes(bills: Sequence[tuple[FitResult, JobCost]]) -> list[str]:
    """Return an explanation of an automatic checkpoint.every, or a warning for each slice where it wastes time."""
    chosen = [f"{bill.saves.every} on {v.slice_name}" for v, bill in bills if v.question.job.checkpoint.every == "auto"]
    if len(chosen) > SHORT_LIST:
        steps = sorted(bill.saves.every for _, bill in bills)
        chosen = [f"{steps[0]} to {steps[-1]} steps"]
    if chosen:
        return [f"checkpoint.every (auto): {', '.join(chosen)}. On {bills[0][0].slice_name}, {_save_times(*bills[0])}."]
    return [
        f"Warning: checkpoint.every={bill.saves.every} takes "
        + (f"{bill.save_waste:.0%} more time" if math.isfinite(bill.save_waste) else "infinitely more time")
        + f" on {v.slice_name} than checkpoint.every={bill.best_every} (assumed preemptions): {_save_times(v, bill)}."
        for v, bill in bills
        if bill.save_waste > WASTE
    ]


def _save_times(v: FitResult, bill: JobCost) -> str:
    assert v.step is not None
    pause, write, step = map(seconds_text, (bill.saves.pause_seconds, bill.saves.write_seconds, v.step.mid_seconds))
    return (
        f"a save of {bill.saves.state_bytes} pauses the run for {pause} and takes {write} to write; a step takes {step}"
    )


def failure_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return the goodput of each run that is so large that failures matter."""
    notes = []
    for v in verdicts:
        found = failures_of(v)
        if found is None or found.between_seconds > OFTEN_DAYS * DAY_SECONDS:
            continue
        what = "GPUs" if v.question.slice.platform == "gpu" else "hosts"
        every = v.question.job.checkpoint.every
        text = (
            f"Failures on {v.slice_name}: {found.hosts:,} {what} have one every {Seconds(found.between_seconds)} "
            f"(assumed), and a recovery takes {Seconds(found.recovery_seconds)}. Goodput: {found.goodput:.1%} "
            f"with checkpoint.every={found.every}, {found.planned_goodput:.1%} with {every}"
        )
        if found.fewer_slices_goodput is not None:
            least = v.question.job.mesh.min_slices
            text += f", {found.fewer_slices_goodput:.1%} with mesh.min_slices={least}"
        notes.append(text + ".")
    return notes


def price_notes(rows: Sequence[tuple[FitResult, JobCost | None]], tariff: Tariff) -> list[str]:
    """Return notes on the prices: their date and zone, slices without a price, and the assumptions for spot."""
    bills = [(v, bill) for v, bill in rows if bill]
    if not bills:
        return []
    offers = [offer for _, bill in bills for offer in (bill.on_demand, bill.spot) if offer]
    dates = sorted({offer.price.date for offer in offers})
    notes = []
    if offers:
        mixed = any(provider_of(offer) != GOOGLE_CLOUD for offer in offers)
        where = "in the cheapest zone of each row (or: --zone ZONE)"
        if tariff.zone:
            where = f"in zone {tariff.zone}"
        elif tariff.providers:
            where = f"of {' and '.join(tariff.providers)}, in the cheapest zone of each row"
        elif mixed:
            where = "of the cheapest provider of each row (or: --provider NAME)"
        notes.append(f"Dollars: list prices of {' and '.join(dates)} {where}, start and checkpoints included.")
        if mixed:
            notes += _provider_notes(bills)
    lacking = [v.slice_name for v, bill in bills if bill.on_demand is None]
    if lacking:
        place = f" in {tariff.zone}" if tariff.zone else ""
        notes.append(f"No price is known{place} for {', '.join(lacking)}: set it with --prices FILE.")
    cheapest = min((b for b in bills if b[1].spot), key=lambda b: b[1].spot.usd.mid, default=None)  # type: ignore[union-attr]
    if cheapest:
        v, bill = cheapest
        assert bill.spot
        notes.append(
            f"Cheapest: {v.slice_name} on spot in {place_text(bill.spot)}, {bill.preemptions:.1f} preemptions expected "
            f"(assumed rate); it writes {bill.written_bytes} of checkpoints and metrics."
        )
    return [*notes, *save_notes(bills)]


def figure_notes(rows: Sequence[tuple[FitResult, JobCost | None]], tariff: Tariff) -> list[str]:
    """Return the notes on the figures of a plan, which the table and the pages have."""
    verdicts = [v for v, _ in rows]
    return [
        *price_notes(rows, tariff),
        *failure_notes(verdicts),
        *attention_notes(verdicts),
        *unroll_notes(verdicts),
        *_doubt_notes(verdicts),
        *_range_notes(verdicts),
    ]


def _doubt_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each reason why times are uncertain, with the affected slices."""
    concerned: dict[str, list[str]] = {}
    for v in verdicts:
        for doubt in v.step.doubts if v.step else ():
            concerned.setdefault(doubt, []).append(v.slice_name)
    timed = sum(v.step is not None for v in verdicts)
    return [
        f"{UNCERTAIN} uncertain{'' if len(names) == timed else f' ({chr(44).join(names)})'}: {doubt}."
        for doubt, names in concerned.items()
    ]


def _range_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each main cause of wide ranges, with the affected slices and the cause's share of the step.

    Causes that concern a complete step are doubts, which `_doubt_notes` has.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    for v in verdicts:
        if v.step is None or max(v.step.high_factor, 1 / v.step.low_factor) < WIDE:
            continue
        if reason := next((one for one in v.step.range_reasons if one.share < 1), None):
            found.setdefault(reason.cause, []).append((v.slice_name, reason.share))
    timed = sum(v.step is not None for v in verdicts)
    notes = []
    for cause, concerned in found.items():
        names, shares = ", ".join(name for name, _ in concerned), sorted({f"{share:.0%}" for _, share in concerned})
        least, most = (f"{of(share for _, share in concerned):.0%}" for of in (min, max))
        where = "" if len(concerned) == timed else f" ({names})"
        notes.append(f"Wide range{where}: {cause}, {least if len(shares) == 1 else f'{least} to {most}'} of the step.")
    return notes


def attention_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each attention kernel on GPU machines, with the machines and why it is not cuDNN's."""
    machines: dict[tuple[str, str | None], list[str]] = {}
    for v in verdicts:
        if v.attention is not None and v.question.slice.platform == "gpu":
            machines.setdefault((v.attention.kernel, v.attention.obstacle), []).append(v.slice_name)
    return [
        f"Attention on {', '.join(dict.fromkeys(names))}: {kernel}{f', because {obstacle}' if obstacle else ''}."
        for (kernel, obstacle), names in machines.items()
    ]


def unroll_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each value that `unroll: auto` got, with the reason."""
    return [
        f"unroll (auto) on {v.slice_name}: {str(v.unroll.unrolled).lower()}, because {v.unroll.reason}."
        for v in verdicts
        if v.unroll is not None
    ]


def place_text(offer: Offer) -> str:
    """Return the zone of an offer, or its provider. A zone of another provider than Google Cloud has both."""
    provider, place = offer.price.provider, offer.price.place
    return place if provider in (GOOGLE_CLOUD, place) else f"{place} ({provider})"


def _provider_notes(bills: Sequence[tuple[FitResult, JobCost]]) -> list[str]:
    """Return a line for each way to pay that names the provider of each row."""
    notes = []
    for way, found in (("On demand", [b.on_demand for _, b in bills]), ("Spot", [b.spot for _, b in bills])):
        names: dict[str, list[str]] = {}
        for (v, _), offer in zip(bills, found, strict=True):
            if offer is not None:
                names.setdefault(provider_of(offer) or "", []).append(v.slice_name)
        if names:
            listed = "; ".join(f"{', '.join(rows)} from {provider}" for provider, rows in names.items())
            notes.append(f"{way}: {listed}.")
    return notes
