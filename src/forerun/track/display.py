"""How a run shows itself: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from forerun.safe_text import redact
from forerun.units import Count, Seconds


@dataclass(frozen=True)
class StepView:
    """What is shown of a finished step; `step` counts from 1 to `steps`."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    mfu: float | None  # share of the chips' peak, 0 .. 1
    eta_seconds: float
    wait_share: float  # of the time, waiting for data, 0 .. 1
    lr: float
    grad_norm: float

    def figures(self) -> list[str]:
        """The figures as text, the most wanted first."""
        return [
            f"loss {self.loss:.4f}",
            f"{Count(round(self.tokens_per_second))} tok/s",
            *([] if self.mfu is None else [f"MFU {self.mfu:.1%}"]),
            f"data wait {self.wait_share:.1%}",
            f"lr {self.lr:.2e}",
            f"grad {self.grad_norm:.3g}",
        ]

    def eta(self) -> str:
        return f"eta {Seconds(self.eta_seconds)}" if self.step < self.steps else "done"


class Phase:
    """A phase under way; set `detail` to what its closing line should say."""

    def __init__(self, name: str, detail: str, clock: Callable[[], float]) -> None:
        self.name, self.detail = name, detail
        self._clock, self._began = clock, clock()

    @property
    def elapsed_seconds(self) -> Seconds:
        return Seconds(self._clock() - self._began)

    def closing(self, failed: bool) -> str:
        """`compile 12.3 s  cache miss  program 3f2a`."""
        time = f"failed after {self.elapsed_seconds}" if failed else str(self.elapsed_seconds)
        return redact("  ".join(part for part in (f"{self.name} {time}", self.detail) if part))


class Display(Protocol):
    """Every member may be called from the loop: none of them waits for the screen."""

    def phase(self, name: str, detail: str = "") -> AbstractContextManager[Phase]:
        """Announce a phase; its time runs until the `with` block ends, then one line stays."""
        ...

    def step(self, view: StepView) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> Display:
    """A live display if `stream` is a terminal that can move its cursor, else plain lines."""
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from forerun.track.terminal import TerminalDisplay

        return TerminalDisplay(stream, clock=clock)
    from forerun.track.plain import PlainDisplay

    return PlainDisplay(stream, clock=clock)
