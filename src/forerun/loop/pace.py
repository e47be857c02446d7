"""How fast a run goes and when it will end, from the steps it has done."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from forerun.program.build import Program
from forerun.program.state import Metrics
from forerun.track.display import StepView

RECENT = 20


class Pace:
    """Knows the last step's figures and the recent steps' times."""

    def __init__(self, program: Program, first: int, peak_flops: float | None) -> None:
        self.first, self.last = first, program.derived.steps
        self.step_seconds: list[float] = []
        self.first_loss = math.nan
        self._program, self._peak_flops = program, peak_flops
        self._began = self._before = time.perf_counter()
        self._number, self._metrics, self._waited_seconds = first, Metrics(math.nan, math.nan, math.nan, 0), 0.0

    def start(self) -> None:
        self._began = self._before = time.perf_counter()

    def resume(self) -> None:
        """The time since the last step was spent on something else than steps."""
        now = time.perf_counter()
        self._began, self._before = self._began + now - self._before, now

    def done(self, number: int, metrics: Metrics, waited_seconds: float) -> None:
        now = time.perf_counter()
        self.step_seconds.append(now - self._before)
        self._before, self._number, self._metrics, self._waited_seconds = now, number, metrics, waited_seconds
        if len(self.step_seconds) == 1:
            self.first_loss = float(metrics.loss)

    def left_out(self, number: int) -> None:
        """A step that was not taken has no figures of its own."""
        self._before, self._number = time.perf_counter(), number

    @property
    def number(self) -> int:
        """The last step that is done."""
        return self._number

    @property
    def loss(self) -> float:
        return float(self._metrics.loss)

    @property
    def total_seconds(self) -> float:
        return self._before - self._began

    @property
    def wait_share(self) -> float:
        return self._waited_seconds / self.total_seconds if self.total_seconds else 0.0

    def recent_seconds(self) -> float:
        """A step's time, the median of the last few: one slow step says nothing about the next."""
        return statistics.median(self.step_seconds[-RECENT:])

    def mfu(self, step_seconds: float) -> float | None:
        if self._peak_flops is None:
            return None
        return self._program.flops_per_step / step_seconds / self._peak_flops

    def tokens_per_second(self, step_seconds: float) -> float:
        return self._program.derived.tokens_per_step / step_seconds

    def figures(self) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        tokens = float(self._metrics.tokens)
        return {
            "loss": self.loss,
            "grad_norm": float(self._metrics.grad_norm),
            "lr": float(self._metrics.lr),
            self._program.method.objective.unit: int(tokens) if math.isfinite(tokens) else None,
            "step_seconds": self.step_seconds[-1],
            "wait_share": self.wait_share,
            **{name: float(value) for name, value in self._metrics.told.items()},
        }

    def view(self) -> StepView:
        step_seconds = self.recent_seconds()
        return StepView(
            step=self._number,
            steps=self.last,
            loss=self.loss,
            tokens_per_second=self.tokens_per_second(step_seconds),
            mfu=self.mfu(step_seconds),
            eta_seconds=(self.last - self._number) * step_seconds,
            wait_share=self.wait_share,
            lr=float(self._metrics.lr),
            grad_norm=float(self._metrics.grad_norm),
        )
