"""The run's figures on disk: `metrics.jsonl`, one line per logged step, and `summary.json`.

A number that is not finite is written as null, because JSON has neither NaN nor infinity. A line's `unix_seconds` is
for charts; nothing is decided by it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forerun.errors import UserError


class MetricsLog:
    """Appends lines, each flushed at once.

    `resume_at` is the last step that the run still stands on: later lines are of steps that will be run again, so
    they are removed, and so is a line torn by a kill. A fresh run resumes at step 0 and removes them all.
    """

    def __init__(self, path: Path, *, resume_at: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _truncate_after(path, resume_at)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **figures: float | int | str | None) -> None:
        row = {"step": step, **figures, "unix_seconds": round(self._clock(), 3)}
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps, in order. A torn last line is left out; any other broken line is an error."""
    return [row for _, row in _rows(path)]


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as JSON, whole or not at all."""
    _replace(path, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _truncate_after(path: Path, step: int) -> None:
    """Always into a new file: a process that owned the run before, and does not know yet, writes into the old one."""
    lines = [line for line, row in _rows(path) if row["step"] <= step]
    _replace(path, "".join(f"{line}\n" for line in lines))


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    *whole, _torn = path.read_bytes().split(b"\n")  # without its newline a line is not finished
    rows = []
    for number, raw in enumerate(whole, 1):
        try:
            line = raw.decode("utf-8")
            row = json.loads(line)
            row["step"] + 0  # every line has a number there
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} is not a line of metrics",
                why=f"{raw[:60]!r}: {error}",
                fix=f"remove it: sed -i {number}d {path}",
            ) from error
        rows.append((line, row))
    return rows


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    value = value.item() if hasattr(value, "item") else value  # a NumPy or jax scalar
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    part.replace(path)
