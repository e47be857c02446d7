"""Threads that forward `metrics.jsonl` to trackers.

The file is the buffer: no metrics are lost while a tracker is unavailable, and the training loop never waits for one.

Delivery is recorded by step. A tracker returns the last step that it has (`begin`). If it cannot, `tracked.json` beside
the metrics has that step. A delivered step is not sent again, even if a resumed run repeats it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.errors import first_line
from forerun.files import atomic_write
from forerun.journal import TailReader
from forerun.reporter import SILENT, Reporter
from forerun.track.backends.job_trackers import trackers_of
from forerun.track.tracker import ConnectionLost, Row, TrackedRun, Tracker

ROWS = 100  # per call of `send`
POLL_SECONDS = 2.0  # rows of that time are sent together, because most of the cost is per call
FIRST_SECONDS, MAX_SECONDS = 1.0, 60.0  # between retries
END_SECONDS = 5.0  # without progress, until the end of a run no longer waits for a tracker


class Cursor:
    """The file `tracked.json`: the token of the run, and the last delivered step of each tracker."""

    def __init__(self, path: Path, reporter: Reporter = SILENT) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            held = json.loads(path.read_bytes())
            steps = {str(name): int(step) for name, step in dict(held["steps"]).items()}
            self._content: dict[str, Any] = {"token": str(held["token"]), "steps": steps}
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            if path.exists():
                reporter.warn(f"{path} is damaged; trackers that cannot report their last step get all rows again")
            self._content = {"token": secrets.token_hex(16), "steps": {}}
            self._write()

    @property
    def token(self) -> str:
        """The random identifier of the run."""
        return str(self._content["token"])

    def step(self, name: str) -> int:
        """Return the last step that was delivered to the tracker `name`, or 0."""
        return int(self._content["steps"].get(name, 0))

    def move(self, name: str, step: int) -> None:
        """Record that `step` was delivered to the tracker `name`."""
        # A full disk is ignored: the tracker itself may know its last step, and the next call writes it again.
        with self._lock, suppress(OSError):
            self._content["steps"][name] = step
            self._write()

    def _write(self) -> None:
        atomic_write(self._path, json.dumps(self._content) + "\n")


class Forwarder:
    """A thread that sends the rows of a metrics file to one tracker, and retries after errors."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, metrics: Path, cursor: Cursor, reporter: Reporter
    ) -> None:
        self.name, self._tracker, self._run, self._cursor, self._reporter = name, tracker, run, cursor, reporter
        self._tail = TailReader(metrics)
        self._waiting: list[Row] = []
        self._sent = cursor.step(name)
        self._begun = False
        self._trouble = ""
        self._ending = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def close(self, last: int) -> None:
        """Wait until the last rows are delivered, as long as there is progress. Report rows that were not delivered.

        `last` is the last step of the run. The tracker learns whether the run has reached it.
        """
        patience = max(END_SECONDS, getattr(self._tracker, "end_seconds", 0.0))
        self._moved = time.monotonic()
        self._ending.set()
        while self._thread.is_alive() and time.monotonic() - self._moved < patience:
            self._thread.join(0.05)
        if self._thread.is_alive() or self._waiting:
            known = f"the last delivered step is {self._sent}" if self._sent else "nothing was delivered"
            why = self._trouble or f"no answer within {patience:g} s"
            self._reporter.warn(f"{self.name} does not have all rows, {known} ({why}); the same command sends the rest")
            if hasattr(self._tracker, "close"):
                self._tracker.close()
        elif hasattr(self._tracker, "end"):
            ending = threading.Thread(target=self._end, args=(self._sent >= last,), daemon=True)
            ending.start()
            ending.join(patience)
            if ending.is_alive() or self._trouble:
                why = self._trouble or f"no answer within {patience:g} s"
                self._reporter.warn(f"{self.name} may not have all rows ({why}); the same command sends the rest")

    def _end(self, finished: bool) -> None:
        try:
            self._tracker.end(finished)  # type: ignore[attr-defined]
        except Exception as error:
            self._trouble = first_line(error)

    def _work(self) -> None:
        """Forward rows until the run ends, with growing delays after errors."""
        delay = FIRST_SECONDS
        while True:
            # Read the flag before the file: if it is set, all rows are already written, and this pass is the last one.
            ending = self._ending.is_set()
            try:
                self._forward(ending)
            except Exception as error:
                self._complain(error)
                if isinstance(error, ConnectionLost):
                    self._restart()
                if ending:
                    return
                self._ending.wait(delay)
                delay = min(2 * delay, MAX_SECONDS)
                continue
            if self._trouble:
                self._reporter.warn(f"{self.name} works again and has all rows up to step {self._sent}")
                self._trouble = ""
            delay = FIRST_SECONDS
            if ending:
                return
            self._ending.wait(POLL_SECONDS)

    def _forward(self, ending: bool) -> None:
        """Read new rows and send them.

        All lines of a step become one row. The newest step is therefore held until a later one arrives or the run ends.
        """
        for row in self._tail.rows():
            if self._waiting and self._waiting[-1]["step"] == row["step"]:  # such as a validation
                self._waiting[-1] = {**self._waiting[-1], **row}
            elif not self._begun or row["step"] > self._sent:
                self._waiting.append(row)
        if not self._begun:
            delivered = self._tracker.begin(self._run)
            self._begun, self._moved = True, time.monotonic()
            self._sent = self._sent if delivered is None else delivered
            self._waiting = [row for row in self._waiting if row["step"] > self._sent]
        while ready := (self._waiting if ending else self._waiting[:-1])[:ROWS]:
            rows = [row for row in ready if row["step"] > self._sent]
            if rows:
                self._tracker.send(rows)
                self._sent, self._moved = int(rows[-1]["step"]), time.monotonic()
                self._cursor.move(self.name, self._sent)
            del self._waiting[: len(ready)]

    def _restart(self) -> None:
        """Read the file from its beginning and begin again: the tracker may lack rows that were sent."""
        self._tail.rewind()
        self._waiting, self._begun, self._sent = [], False, self._cursor.step(self.name)

    def _complain(self, error: Exception) -> None:
        """Report the first of several errors in succession."""
        text = first_line(error)
        if not self._trouble:
            self._reporter.warn(
                f"{self.name} does not accept rows ({text}); they are kept in metrics.jsonl and sent later"
            )
        self._trouble = text


@contextmanager
def tracking(job: Job, metrics: Path, last: int, reporter: Reporter) -> Iterator[None]:
    """Forward the metrics of a run to the job's trackers while the block runs, including rows of earlier runs.

    Args:
        job: The job, which names the trackers.
        metrics: The metrics file. A resumed run must have removed later steps from it before this call.
        last: The last step of the run.
        reporter: Receives messages about trackers that fail.
    """
    trackers = trackers_of(job.track)
    if not trackers:
        yield
        return
    cursor = Cursor(metrics.with_name("tracked.json"), reporter)
    run = TrackedRun(job.name, metrics.parent, cursor.token, _flat(job))
    with ExitStack() as stack:
        for name, tracker in trackers.items():
            forwarder = Forwarder(name, tracker, run, metrics, cursor, reporter)
            stack.callback(forwarder.close, last)
        yield


def _flat(job: Job) -> Mapping[str, Any]:
    """Return the values of the job by key, without those about trackers and the folder of runs."""
    return {key: value for key, value in values(job).items() if not key.startswith(("track.", "runs"))}
