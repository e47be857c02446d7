"""The newest values of a run, computed from its records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from forerun.report.run_record import RunRecord
from forerun.report.run_status import seconds_per_step
from forerun.track.goodput import goodput_of
from forerun.units import Bytes, Count, Seconds


@dataclass(frozen=True)
class RunFigures:
    """The newest values of a run. A value is None if the run has not recorded it.

    Attributes:
      steps: the number of steps of the job.
      best_validation: the lowest validation loss.
      mfu, wait_share, goodput: shares from 0 to 1.
      memory_bytes, memory_peak_bytes: of the device with the most memory in use.
      restarts: the number of processes before the newest one.
      skips: the number of skipped steps.
    """

    step: int
    steps: int | None
    eta_seconds: float | None
    loss: float | None
    validation: float | None
    best_validation: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    mfu: float | None
    wait_share: float | None
    memory_bytes: int | None
    memory_peak_bytes: int | None
    goodput: float | None
    restarts: int | None
    skips: int

    @property
    def share(self) -> float | None:
        """The share of the steps that are done, from 0 to 1."""
        return min(1.0, self.step / self.steps) if self.steps else None

    def texts(self) -> list[tuple[str, str]]:
        """Return (name, value) of each known value, the most important first."""
        best = self.best_validation
        validation = "" if self.validation is None else f"{self.validation:.4f}"
        if best is not None and self.validation is not None and best < self.validation:
            validation += f" (best {best:.4f})"
        memory = "" if self.memory_bytes is None else str(Bytes(self.memory_bytes))
        if memory and self.memory_peak_bytes is not None:
            memory += f" (peak {Bytes(self.memory_peak_bytes)})"
        found = [
            ("loss", _text(self.loss, ".4f")),
            ("validation", validation),
            ("tokens/s", "" if self.tokens_per_second is None else str(Count(round(self.tokens_per_second)))),
            ("MFU", _text(self.mfu, ".1%")),
            ("lr", _text(self.lr, ".2e")),
            ("grad norm", _text(self.grad_norm, ".3g")),
            ("data wait", _text(self.wait_share, ".1%")),
            ("memory", memory),
            ("goodput", _text(self.goodput, ".1%")),
            ("restarts", _text(self.restarts, "d")),
            ("skipped", str(self.skips)),
        ]
        return [(name, value) for name, value in found if value]

    def eta(self) -> str:
        """Return the remaining time as a text, or "" if it is unknown."""
        return "" if self.eta_seconds is None else f"eta {Seconds(self.eta_seconds)}"


def figures_of(record: RunRecord) -> RunFigures:
    """Return the newest values of a run."""
    steps, step = record.job.steps, record.step
    per_step = seconds_per_step(record)
    validations = [value for _, value in record.points("validation_loss")]
    starts = sum(event.get("event") == "start" for event in record.events)
    memory, peak = _newest(record, "hbm_bytes"), _newest(record, "hbm_peak_bytes")
    goodput = goodput_of(record.events)
    return RunFigures(
        step=step,
        steps=steps,
        eta_seconds=(steps - step) * per_step if steps and per_step is not None and step < steps else None,
        loss=_newest(record, "loss"),
        validation=validations[-1] if validations else None,
        best_validation=min(validations, default=None),
        lr=_newest(record, "lr"),
        grad_norm=_newest(record, "grad_norm"),
        tokens_per_second=_newest(record, "tokens_per_second"),
        mfu=_newest(record, "mfu"),
        wait_share=_newest(record, "wait_share"),
        memory_bytes=None if memory is None else int(memory),
        memory_peak_bytes=None if peak is None else int(peak),
        goodput=goodput.share if goodput else _newest(record, "goodput"),
        restarts=starts - 1 if starts else None,
        skips=len(record.skips),
    )


def _newest(record: RunRecord, key: str) -> float | None:
    """Return the newest finite number of a key."""
    for row in reversed(record.metrics):
        value: Any = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
