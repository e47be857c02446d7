"""Labels of axes: round numbers and times, and the text of a value."""

from __future__ import annotations

import math

from forerun.units import Bytes, Seconds, digits

Ticks = list[tuple[float, str]]
MOST = 5
SIZES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
MINUTE, HOUR, DAY = 60, 3600, 86400
TIME_STEPS = (
    *(1, 2, 5, 10, 20, 30),
    *(number * MINUTE for number in (1, 2, 5, 10, 20, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
)


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
