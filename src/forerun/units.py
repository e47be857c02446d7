"""Numbers with a unit that print in a readable form.

Each is a plain `int` or `float` for arithmetic. Only its text differs.
"""

from __future__ import annotations

import math

KIB, MIB, GIB, TIB, PIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40, 1 << 50


def digits(value: float, count: int) -> str:
    """Return `value` rounded to `count` significant digits, without an exponent: 0.27, 9.9, 1,230."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{count - 1}e}")
    places = max(0, count - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{places}f}"


class Bytes(int):
    """A number of bytes. It prints three significant digits, and two decimals between 1 and 100 GiB.

    The size of HBM is known to 0.01 GiB, and a job may exceed it by only 0.05 GiB.
    """

    def __str__(self) -> str:
        for size, unit in ((PIB, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if abs(self) >= size:
                value = self / size
                if unit == "GiB" and abs(value) < 99.995:
                    return f"{value:.2f} GiB"
                return f"{value:,.0f} {unit}" if abs(value) >= 999.5 else f"{digits(value, 3)} {unit}"
        return f"{int(self)} B"


class Seconds(float):
    """A time, which prints as milliseconds, seconds, minutes or hours."""

    def __str__(self) -> str:
        value = float(self)
        if abs(value) < 0.9995:  # above, three digits would print 1e+03 ms
            return f"{value * 1e3:.3g} ms"
        if abs(value) < 120:
            return f"{value:.1f} s"
        minutes, seconds = divmod(round(value), 60)
        if minutes < 60:
            return f"{minutes} min {seconds:02d} s"
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min"


class Usd(float):
    """A predicted amount of dollars, printed as precisely as step times are predicted.

    It prints two significant digits below $100, and three above.
    """

    def __str__(self) -> str:
        value = float(self)
        if 0 < value < 0.005:
            return "<$0.01"
        if value < 0.995:
            return f"${value:.2f}"
        for size, unit in ((1e6, "M"), (1e3, "k")):
            if value >= max(size, 99_950):
                return f"${digits(value / size, 3)}{unit}"
        return f"${digits(value, 2 if value < 100 else 3)}"


class Count(int):
    """A number of parameters, tokens or FLOPs, such as 596M or 8.03B."""

    def __str__(self) -> str:
        for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if abs(self) >= size:
                return f"{self / size:.3g}{unit}"
        return str(int(self))
