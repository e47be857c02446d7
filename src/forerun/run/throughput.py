"""Throughput of a run and its remaining time, from the times of finished steps."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from forerun.hardware.device_memory import DeviceMemory
from forerun.program.build import Program
from forerun.program.state import Metrics
from forerun.reporter import StepView

RECENT = 20  # steps whose median time is reported


class Throughput:
    """Measures the time of steps and keeps the metrics of the last one.

    Args:
      program: defines the number of steps, and the tokens and FLOPs of a step.
      first: the step that the run starts after: 0, or the step of its checkpoint.
      peak_flops: the peak FLOP/s of all devices, or None if it is unknown.
      memory: the memory of this host's devices. None: it is not recorded.
    """

    def __init__(
        self, program: Program, first: int, peak_flops: float | None, memory: DeviceMemory | None = None
    ) -> None:
        self.first, self.last = first, program.derived.steps
        self.step_seconds: list[float] = []
        self._program, self._peak_flops, self._memory = program, peak_flops, memory or DeviceMemory(())
        # The steps since the last row, and their seconds. Rates of a row are means over them.
        self._row_steps, self._row_seconds = 0, 0.0
        self._began = self._before = time.perf_counter()
        self._step, self._metrics, self._waited_seconds = first, Metrics(math.nan, math.nan, math.nan, 0), 0.0

    def start(self) -> None:
        """Start the clock, right before the first step."""
        self._began = self._before = time.perf_counter()

    def exclude(self) -> None:
        """Exclude the time since the last step from throughput (an evaluation)."""
        now = time.perf_counter()
        self._began, self._before = self._began + now - self._before, now

    def finish(self, step: int, metrics: Metrics, waited_seconds: float) -> None:
        """Record a step that was taken, and the seconds that the run has waited for data so far."""
        now = time.perf_counter()
        self.step_seconds.append(now - self._before)
        self._row_steps, self._row_seconds = self._row_steps + 1, self._row_seconds + self.step_seconds[-1]
        self._before, self._step, self._metrics, self._waited_seconds = now, step, metrics, waited_seconds

    def skip(self, step: int) -> None:
        """Record a skipped step. It has no metrics, and its time is not counted as the time of a step."""
        self._before, self._step = time.perf_counter(), step

    @property
    def step(self) -> int:
        """The last finished step, taken or skipped."""
        return self._step

    @property
    def loss(self) -> float | None:
        """The loss of the last step that was taken, or None if no token of its batch had a loss.

        Such a batch has no mean. The step divides by 1 instead of 0, so that its sums are 0: a loss of 0 would be the
        best one of the run.
        """
        loss, norm = float(self._metrics.loss), float(self._metrics.grad_norm)
        return None if loss == norm == 0.0 and float(self._metrics.tokens) <= 1.0 else loss

    @property
    def total_seconds(self) -> float:
        """The seconds from the start to the last step, without excluded time."""
        return self._before - self._began

    @property
    def wait_share(self) -> float:
        """The share of the total time in which the run waited for data."""
        return self._waited_seconds / self.total_seconds if self.total_seconds else 0.0

    def mfu(self, step_seconds: float) -> float | None:
        """Return the model FLOPs utilization, or None if the peak is unknown."""
        if self._peak_flops is None:
            return None
        return self._program.flops_per_step / step_seconds / self._peak_flops

    def tokens_per_second(self, step_seconds: float) -> float:
        """Return the tokens per second of all devices, padding included."""
        return self._program.derived.tokens_per_step / step_seconds

    def samples_per_second(self, step_seconds: float) -> float:
        """Return the rows of the batch per second, over all devices."""
        return self._program.derived.batch / step_seconds

    def epoch(self) -> float | None:
        """Return the epochs up to the last step, or None if the size of an epoch is unknown."""
        per_epoch = self._program.derived.steps_per_epoch
        return self._step / per_epoch if per_epoch else None

    def epoch_seconds(self, step_seconds: float) -> float | None:
        """Return the seconds that an epoch takes at this step time, or None if the size of an epoch is unknown."""
        per_epoch = self._program.derived.steps_per_epoch
        return per_epoch * step_seconds if per_epoch else None

    def memory_bytes(self) -> dict[str, int]:
        """Return the memory in use now and its peak. Empty if the devices do not report it."""
        return self._memory.read()

    def take_metrics_row(self) -> dict[str, Any]:
        """Return what metrics.jsonl records about the last step, and start the interval of the next row.

        Rates are means over the steps since the last row. Values that are unknown on these devices are omitted.
        """
        loss = self.loss
        tokens = 0.0 if loss is None else float(self._metrics.tokens)
        mean_seconds = self._row_seconds / self._row_steps
        self._row_steps, self._row_seconds = 0, 0.0
        known = {
            "mfu": self.mfu(mean_seconds),
            "epoch": self.epoch(),
            "epoch_seconds": self.epoch_seconds(mean_seconds),
        }
        return {
            **({} if loss is None else {"loss": loss}),
            "grad_norm": float(self._metrics.grad_norm),
            "lr": float(self._metrics.lr),
            self._program.method.objective.unit: int(tokens) if math.isfinite(tokens) else None,
            "step_seconds": self.step_seconds[-1],
            "wait_share": self.wait_share,
            "tokens_per_second": self.tokens_per_second(mean_seconds),
            "samples_per_second": self.samples_per_second(mean_seconds),
            **{name: value for name, value in known.items() if value is not None},
            **self.memory_bytes(),
            **{name: float(value) for name, value in self._metrics.told.items()},
        }

    def view(self) -> StepView:
        """Return the values of the last step for the reporter."""
        step_seconds = statistics.median(self.step_seconds[-RECENT:])  # it ignores single slow steps
        return StepView(
            step=self._step,
            steps=self.last,
            loss=self.loss,
            tokens_per_second=self.tokens_per_second(step_seconds),
            mfu=self.mfu(step_seconds),
            eta_seconds=(self.last - self._step) * step_seconds,
            wait_share=self.wait_share,
            lr=float(self._metrics.lr),
            grad_norm=float(self._metrics.grad_norm),
        )
