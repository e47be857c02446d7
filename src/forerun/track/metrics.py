"""The run's figures on disk: `metrics.jsonl`, one line per logged step, and `summary.json`.

A number that is not finite is written as null, because JSON has neither NaN nor infinity. A line's `unix_seconds` is
for charts; nothing is decided by it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.files import atomic_write
from forerun.journal import Journal, Seal, entry_of


class MetricsLog(Journal):
    """Appends a line per logged step.

    `resume_at` is the step of the checkpoint that the run resumes from: later lines belong to steps that are run
    again, so they are removed. A new run resumes at step 0.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_at: int = 0,
        seals: Sequence[Seal] = (),
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        super().__init__(path, last=resume_at, seals=seals, tell=tell)

    def write(self, step: int, **figures: float | int | str | None) -> None:
        row = {"step": step, **figures, "unix_seconds": round(self._clock(), 3)}
        self.append(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logged steps, in order. Lines that are not metrics, and a torn last line, are omitted.

    A resumed run reports such lines (`forerun.journal`).
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")  # without its newline a line is not finished
    return [row for line in lines if (row := entry_of(line)) is not None]


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as JSON, whole or not at all."""
    atomic_write(path, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    value = value.item() if hasattr(value, "item") else value  # a NumPy or jax scalar
    return None if isinstance(value, float) and not math.isfinite(value) else value
