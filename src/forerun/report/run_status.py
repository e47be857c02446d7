"""Whether a run makes progress, from its records and its processes."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from forerun.report.run_files import read_object
from forerun.report.run_record import HOSTS, RunRecord
from forerun.supervise.run_lock import LOST_SECONDS, holder_of, lock_file
from forerun.units import Seconds

# The state of a run becomes SILENT after this time, or after this number of usual times between two rows.
SILENT_SECONDS, SILENT_ROWS = 60.0, 20
SUPERVISED_SECONDS = 30.0  # without a new hosts.json, until the supervisor counts as gone
RECENT_ROWS = 50


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    WAITING = "waiting"  # a process has the run, and it makes no steps yet: it reads data, compiles or restores
    SILENT = "silent"  # a process has the run, or may have it, and there is no news
    STOPPED = "stopped"  # as asked; of a run without events.jsonl the cause is not known
    INTERRUPTED = "interrupted"  # its process is gone without a recorded stop: it was killed, or it failed
    NOT_STARTED = "not started"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunStatus:
    """The state of a run at one moment.

    Attributes:
      state: the state.
      detail: the phase of a waiting run, or the reason of a stop; may be empty.
      age_seconds: the time since the last news of the run, or None if there is none.
    """

    state: RunState
    detail: str = ""
    age_seconds: float | None = None

    def __str__(self) -> str:
        if self.state is RunState.SILENT and self.age_seconds is not None:
            return f"no news for {Seconds(self.age_seconds)}"
        return f"{self.state} ({self.detail})" if self.detail else str(self.state)


def has_process(run: Path, record_hosts: dict[str, Any], now: float) -> bool:
    """Return whether a process trains the run, from its lock file and its hosts.json.

    Nothing is locked here: a lock for a moment would reject a training process that starts in this moment.
    """
    if now - _number(record_hosts.get("unix_seconds"), 0.0) < SUPERVISED_SECONDS:
        return True  # a supervisor may have the run while no worker has its lock
    file = lock_file(run)
    try:
        beat_seconds = now - file.stat().st_mtime
    except OSError:
        return False
    holder = holder_of(file)
    if holder is not None and holder.host == socket.gethostname() and not _exists(holder.pid):
        return False
    return beat_seconds < LOST_SECONDS


def is_starting(run: Path) -> bool:
    """Return whether a process has a run that has no job.yaml yet, because it still reads its data."""
    return not (run / "job.yaml").exists() and has_process(run, read_object(run / HOSTS), time.time())


def status_of(record: RunRecord, run: Path | None, now: float | None = None) -> RunStatus:
    """Return the status of a run.

    Args:
      record: what the run has recorded.
      run: the folder of the run, or None for a run in a bucket, whose processes are not known.
      now: the Unix time, by default that of the clock.
    """
    now = time.time() if now is None else now
    news = last_news(record)
    age = None if news is None else max(0.0, now - news)
    alive = None if run is None else has_process(run, record.hosts, now)
    event = _last(record, "phase", "stop", "end", "start")
    kind, steps = event.get("event"), record.job.steps
    # The process that writes `stop` or `end` still exists for a moment. One that continues the run writes `start`.
    is_over = kind in ("stop", "end")
    is_extended = bool(alive) and not is_over and steps is not None and record.step < steps
    if record.is_finished and not is_extended:
        return RunStatus(RunState.FINISHED, "", age)
    if kind == "stop":
        return RunStatus(RunState.STOPPED, str(event.get("reason") or ""), age)
    if alive is False and not record.events:
        return RunStatus(RunState.STOPPED if record.metrics else RunState.NOT_STARTED, "", age)
    if alive is False:
        return RunStatus(RunState.INTERRUPTED, "", age)
    phase = str(event.get("name") or "") if kind == "phase" else ""
    if alive and (kind == "start" or phase in ("data", "compile", "restore") or not record.metrics):
        return RunStatus(RunState.WAITING, phase or "start", age)
    if age is not None and age > silent_seconds(record):
        return RunStatus(RunState.SILENT, phase, age)
    return RunStatus(RunState.RUNNING, "finish" if phase == "finish" else "", age)


def last_news(record: RunRecord) -> float | None:
    """Return the Unix time of the newest row or event, or None if no line has a time."""
    times = [_number(rows[-1].get("unix_seconds"), 0.0) for rows in (record.metrics, record.events) if rows]
    return max(times, default=0.0) or None


def silent_seconds(record: RunRecord) -> float:
    """Return the time without news after which a run counts as silent."""
    return max(SILENT_SECONDS, SILENT_ROWS * (row_seconds(record) or 0.0))


def seconds_per_step(record: RunRecord) -> float | None:
    """Return the median wall time of recent steps, or None if it is unknown.

    It includes saves and evaluations between two rows. The median ignores the time between a stop and a restart.
    """
    return _median_gap(record, per_step=True)


def row_seconds(record: RunRecord) -> float | None:
    """Return the median wall time between recent rows, or None if it is unknown."""
    return _median_gap(record, per_step=False)


def _median_gap(record: RunRecord, *, per_step: bool) -> float | None:
    rows = [
        (row["step"], row["unix_seconds"])
        for row in record.metrics[-2 * RECENT_ROWS :]
        if "loss" in row and isinstance(row.get("unix_seconds"), int | float)
    ]
    gaps = [
        (after[1] - before[1]) / (after[0] - before[0] if per_step else 1)
        for before, after in pairwise(rows[-RECENT_ROWS:])
        if after[0] > before[0] and after[1] >= before[1]
    ]
    return statistics.median(gaps) if gaps else None


def _last(record: RunRecord, *kinds: str) -> dict[str, Any]:
    return next((event for event in reversed(record.events) if event.get("event") in kinds), {})


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True
