"""The interface of displays, which show the phases, steps and messages of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from forerun.safe_text import redact
from forerun.units import Count, Seconds


@dataclass(frozen=True)
class StepView:
    """The metrics of a finished step that a display shows. `step` counts from 1 to `steps`."""

    step: int
    steps: int
    loss: float | None  # None: no token of the batch has a loss
    tokens_per_second: float
    mfu: float | None  # share of the peak FLOP/s of the chips, from 0 to 1
    eta_seconds: float
    wait_share: float  # share of the time spent waiting for data, from 0 to 1
    lr: float
    grad_norm: float

    def figures(self) -> list[str]:
        """Return the metrics as texts, the most important first."""
        return [
            "no token with a loss" if self.loss is None else f"loss {self.loss:.4f}",
            f"{Count(round(self.tokens_per_second))} tok/s",
            *([] if self.mfu is None else [f"MFU {self.mfu:.1%}"]),
            f"data wait {self.wait_share:.1%}",
            f"lr {self.lr:.2e}",
            f"grad {self.grad_norm:.3g}",
        ]

    def eta(self) -> str:
        """Return the remaining time as a text, or "done" after the last step."""
        return f"eta {Seconds(self.eta_seconds)}" if self.step < self.steps else "done"


class Phase:
    """A running phase. Its closing line ends with `detail`, which can be set while it runs.

    `expected_seconds` is the time that it took before, if known.
    """

    def __init__(self, name: str, detail: str, clock: Callable[[], float]) -> None:
        self.name, self.detail = name, detail
        self.expected_seconds: float | None = None
        self._clock, self._began = clock, clock()

    @property
    def elapsed_seconds(self) -> Seconds:
        return Seconds(self._clock() - self._began)

    def running(self) -> str:
        """Return a line while the phase runs, such as `compile ... 30.0 s so far, 45.2 s last time`."""
        before = "" if self.expected_seconds is None else f", {Seconds(self.expected_seconds)} last time"
        text = f"{self.name} ... {self.elapsed_seconds} so far{before}"
        return redact("  ".join(part for part in (text, self.detail) if part))

    def closing(self, failed: bool) -> str:
        """Return the closing line, such as `compile 12.3 s  cache miss  program 3f2a`."""
        time = f"failed after {self.elapsed_seconds}" if failed else str(self.elapsed_seconds)
        return redact("  ".join(part for part in (f"{self.name} {time}", self.detail) if part))


class Display(Protocol):
    """A display of a run. The training loop calls its methods, so they must not wait for the terminal."""

    def phase(self, name: str, detail: str = "") -> AbstractContextManager[Phase]:
        """Show a phase and its time while the block runs, then print its closing line."""
        ...

    def step(self, view: StepView) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
