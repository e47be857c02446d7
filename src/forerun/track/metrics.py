"""The metrics of a run on disk: `metrics.jsonl`, with one line per logged step, and `summary.json`.

A number that is not finite is written as null, because JSON has neither NaN nor infinity. The `unix_seconds` of a line
are for charts only; no decision depends on them.
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
from forerun.reporter import SILENT, Reporter


class MetricsLog(Journal):
    """The file `metrics.jsonl`, with one line per logged step.

    `resume_at` is the step of the checkpoint that the run resumes from, or 0 for a new run. Later lines are removed,
    because their steps are run again.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_at: int = 0,
        seals: Sequence[Seal] = (),
        reporter: Reporter = SILENT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        super().__init__(path, last=resume_at, seals=seals, reporter=reporter)

    def write(self, step: int, **figures: Any) -> None:
        """Append the metrics of a step. Numbers that are not finite become null."""
        row = {"step": step, **figures, "unix_seconds": round(self._clock(), 3)}
        self.append(json.dumps(_finite(row), allow_nan=False).encode() + b"\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logged lines in order, or an empty list if the file does not exist.

    Broken lines and an incomplete last line are omitted. A resumed run reports them (`forerun.journal`).
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")  # a line without its newline is incomplete
    return [row for line in lines if (row := entry_of(line)) is not None]


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as JSON, atomically."""
    atomic_write(path, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Return plain data in which every number that is not finite is None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    value = value.item() if hasattr(value, "item") else value  # a NumPy or jax scalar
    return None if isinstance(value, float) and not math.isfinite(value) else value
