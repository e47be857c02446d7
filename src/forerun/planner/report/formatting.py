"""Formatting of a plan's figures, for both the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.hardware.slices import Slice
from forerun.planner.compile.fit_result import FitResult
from forerun.units import GIB, Count, Usd

UNCERTAIN = "~"


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
