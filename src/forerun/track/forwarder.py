"""From `metrics.jsonl` to a tracker, in a thread of its own. The file is the buffer: nothing is lost while a tracker is
down, and the loop never waits for one.

What a tracker has is known by step. It says so itself when it can (`begin`); if not, `tracked.json` beside the metrics
does. A step that was delivered is not sent again, also not when a resumed run comes to it a second time.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from forerun.config.load import values
from forerun.config.schema import Job
from forerun.files import atomic_write
from forerun.journal import entry_of
from forerun.track.tracker import Row, Run, Tracker, trackers_of

ROWS = 100  # at a time
POLL_SECONDS = 0.5
FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0  # between tries
END_SECONDS = 5.0  # without an answer, at the end of a run


class Cursor:
    """`tracked.json`: the run's token, and per tracker the last step that was delivered."""

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            held = json.loads(path.read_bytes())
            steps = {str(name): int(step) for name, step in dict(held["steps"]).items()}
            self._content: dict[str, Any] = {"token": str(held["token"]), "steps": steps}
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            if path.exists():
                tell(f"{path} is damaged; trackers that cannot tell what they have get all rows again")
            self._content = {"token": secrets.token_hex(16), "steps": {}}
            self._write()

    @property
    def token(self) -> str:
        return str(self._content["token"])

    def step(self, name: str) -> int:
        return int(self._content["steps"].get(name, 0))

    def move(self, name: str, step: int) -> None:
        with self._lock, suppress(OSError):  # a full disk: the tracker itself, or the next move, will know
            self._content["steps"][name] = step
            self._write()

    def _write(self) -> None:
        atomic_write(self._path, json.dumps(self._content) + "\n")


class Tail:
    """Whole lines of a growing file, each once; from its start again if it was replaced, as after a rewind."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._node = path, 0, 0

    def rows(self) -> Iterator[Row]:
        try:
            with open(self._path, "rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._node or about.st_size < self._at:
                    self._at, self._node = 0, about.st_ino
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    self._at += len(line)
                    if (row := entry_of(line)) is not None:  # a resumed run reports and removes broken lines
                        yield row
        except FileNotFoundError:
            return


class Forwarder:
    def __init__(
        self, name: str, tracker: Tracker, run: Run, metrics: Path, cursor: Cursor, tell: Callable[[str], None]
    ) -> None:
        self.name, self._tracker, self._run, self._cursor, self._tell = name, tracker, run, cursor, tell
        self._tail = Tail(metrics)
        self._waiting: list[Row] = []
        self._sent = cursor.step(name)
        self._begun = False
        self._trouble = ""
        self._ending = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)
        self._thread.start()

    def close(self, last: int) -> None:
        """Waits for the last rows as long as they move, and says what was not delivered. `last`: of the whole run."""
        self._moved = time.monotonic()
        self._ending.set()
        while self._thread.is_alive() and time.monotonic() - self._moved < END_SECONDS:
            self._thread.join(0.05)
        if self._thread.is_alive() or self._waiting:
            known = f"the last delivered step is {self._sent}" if self._sent else "nothing was delivered"
            why = self._trouble or f"no answer within {END_SECONDS:g} s"
            self._tell(f"{self.name} does not have all rows, {known} ({why}); the same command sends the rest")
        elif hasattr(self._tracker, "end"):
            ending = threading.Thread(target=self._end, args=(self._sent >= last,), daemon=True)
            ending.start()
            ending.join(END_SECONDS)

    def _end(self, finished: bool) -> None:
        with suppress(Exception):
            self._tracker.end(finished)  # type: ignore[attr-defined]

    def _work(self) -> None:
        delay = FIRST_SECONDS
        while True:
            ending = self._ending.is_set()  # asked before reading: then nothing was written after the last look
            try:
                self._forward(ending)
            except Exception as error:
                self._complain(error)
                if ending:
                    return
                self._ending.wait(delay)
                delay = min(2 * delay, MOST_SECONDS)
                continue
            if self._trouble:
                self._tell(f"{self.name} has all rows again, to step {self._sent}")
                self._trouble = ""
            delay = FIRST_SECONDS
            if ending:
                return
            self._ending.wait(POLL_SECONDS)

    def _forward(self, ending: bool) -> None:
        """All lines of a step are one row; so the newest step waits until a later one is there, or the run ends."""
        for row in self._tail.rows():
            if self._waiting and self._waiting[-1]["step"] == row["step"]:  # a look at the validation, for one
                self._waiting[-1] = {**self._waiting[-1], **row}
            elif row["step"] > self._sent:
                self._waiting.append(row)
        if not self._begun:
            there = self._tracker.begin(self._run)
            self._begun, self._moved = True, time.monotonic()
            self._sent = self._sent if there is None else there
            self._waiting = [row for row in self._waiting if row["step"] > self._sent]
        while ready := (self._waiting if ending else self._waiting[:-1])[:ROWS]:
            rows = [row for row in ready if row["step"] > self._sent]
            if rows:
                self._tracker.send(rows)
                self._sent, self._moved = int(rows[-1]["step"]), time.monotonic()
                self._cursor.move(self.name, self._sent)
            del self._waiting[: len(ready)]

    def _complain(self, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        if not self._trouble:
            self._tell(f"{self.name} does not take rows ({text}); they are kept in metrics.jsonl and sent later")
        self._trouble = text


@contextmanager
def tracking(job: Job, metrics: Path, last: int, tell: Callable[[str], None]) -> Iterator[None]:
    """Forward what is written to `metrics` to the job's trackers for as long as the block runs, and what was not
    delivered before. Enter it when the metrics are as the run goes on from them; `last` is its last step."""
    trackers = trackers_of(job.track)
    if not trackers:
        yield
        return
    cursor = Cursor(metrics.with_name("tracked.json"), tell)
    run = Run(job.name, metrics.parent, cursor.token, _flat(job))
    with ExitStack() as stack:
        for name, tracker in trackers.items():
            forwarder = Forwarder(name, tracker, run, metrics, cursor, tell)
            stack.callback(forwarder.close, last)
        yield


def _flat(job: Job) -> Mapping[str, Any]:
    return {key: value for key, value in values(job).items() if not key.startswith(("track.", "runs"))}
