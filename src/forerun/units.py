"""Numbers that carry their unit and print as a person would say them.

Each is a plain `int` or `float` for arithmetic; only its text differs.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Bytes(int):
    def __str__(self) -> str:
        for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if abs(self) >= size:
                return f"{self / size:.2f} {unit}"
        return f"{int(self)} B"


class Seconds(float):
    def __str__(self) -> str:
        value = float(self)
        if abs(value) < 0.9995:  # beyond, three digits would read 1e+03 ms
            return f"{value * 1e3:.3g} ms"
        if abs(value) < 120:
            return f"{value:.1f} s"
        minutes, seconds = divmod(round(value), 60)
        if minutes < 60:
            return f"{minutes} min {seconds:02d} s"
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min"


class Usd(float):
    def __str__(self) -> str:
        return f"${float(self):,.2f}"


class Count(int):
    """Parameters, tokens, FLOPs: 596M, 8.03B."""

    def __str__(self) -> str:
        for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if abs(self) >= size:
                return f"{self / size:.3g}{unit}"
        return str(int(self))
