"""Formatting of a plan's figures, for both the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.hardware.slices import Slice
from forerun.planner.compile.fit_result import FitResult
from forerun.units import GIB, Count, Usd

UNCERTAIN = "~"
WIDE = 1.3  # a range that ends here or beyond gets a note with its main cause


def gib_text(n: int) -> str:
    """Return bytes as GiB with two decimals, without the unit."""
    return f"{n / GIB:.2f}"


def seconds_text(seconds: float) -> str:
    """Return a time with three digits: 87.3 ms, 3.44 s, 128 s."""
    if seconds < 0.9995:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds)} s"


def _digits(value: float) -> str:
    """Return a value with three digits and without an exponent."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def step_text(v: FitResult) -> str:
    """Return the time of a step, or `-` if it is unknown. `~` marks a time that published runs say little about."""
    if v.step is None:
        return "-"
    return f"{UNCERTAIN if v.step.doubts else ''}{seconds_text(v.step.mid_seconds)}"


def doubt_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each reason why times are uncertain, with the affected slices."""
    concerned: dict[str, list[str]] = {}
    for v in verdicts:
        for doubt in v.step.doubts if v.step else ():
            concerned.setdefault(doubt, []).append(v.question.slice.name)
    timed = sum(v.step is not None for v in verdicts)
    return [
        f"{UNCERTAIN} uncertain{'' if len(names) == timed else f' ({chr(44).join(names)})'}: {doubt}."
        for doubt, names in concerned.items()
    ]


def range_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each main cause of wide ranges, with the affected slices and the cause's share of the step.

    Causes that concern a complete step are doubts, which `doubt_notes` has.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    for v in verdicts:
        if v.step is None or max(v.step.high_factor, 1 / v.step.low_factor) < WIDE:
            continue
        if reason := next((one for one in v.step.range_reasons if one.share < 1), None):
            found.setdefault(reason.cause, []).append((v.question.slice.name, reason.share))
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
            machines.setdefault((v.attention.kernel, v.attention.obstacle), []).append(v.question.slice.name)
    return [
        f"Attention on {', '.join(dict.fromkeys(names))}: {kernel}{f', because {obstacle}' if obstacle else ''}."
        for (kernel, obstacle), names in machines.items()
    ]


def unroll_notes(verdicts: Sequence[FitResult]) -> list[str]:
    """Return a line for each value that `unroll: auto` got, with the reason."""
    return [
        f"unroll (auto) on {v.question.slice.name}: {str(v.unroll.unrolled).lower()}, because {v.unroll.reason}."
        for v in verdicts
        if v.unroll is not None
    ]


def range_text(v: FitResult) -> str:
    """Return the range of a step's time as `(low-high)`, in the unit that `step_text` uses."""
    if v.step is None:
        return ""
    scale = 1e3 if v.step.mid_seconds < 0.9995 else 1
    low, high = v.step.low_seconds * scale, v.step.high_seconds * scale
    return f"({_digits(low)}-{_digits(high)})"


def hours_text(hours: float) -> str:
    return f"{hours:,.2f}" if hours < 10 else f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}"


def usd_text(usd: float) -> str:
    """Return an amount without the dollar sign."""
    return str(Usd(usd)).replace("$", "")


def rate_text(tokens_per_second: float | None) -> str:
    """Return a rate as a count, or `-` if it is unknown."""
    return "-" if tokens_per_second is None else str(Count(round(tokens_per_second)))


def limit_text(v: FitResult) -> str:
    """Return what limits the step, or `-` if the time is unknown. Not every GPU has HBM, so it is called memory."""
    if v.step is None:
        return "-"
    gpu = v.question.slice.platform == "gpu"
    return "memory" if gpu and v.step.limit == "HBM" else v.step.limit


def places_text(places: Iterable[Slice], *, one: bool = False) -> str:
    """Return what the places of a plan are called: slices (TPU), machines (GPU), or both. `one` is the singular."""
    platforms = {place.platform for place in places}
    names = [name for platform, name in (("tpu", "slice"), ("gpu", "machine")) if platform in platforms]
    return (" or " if one else " and ").join(names if one else [f"{name}s" for name in names])
