"""Units of a store that is being built: the build in the background, and the wait for units.

Until the first step, the workers of the build have the usual priority, because the training waits for them. Then they
have a lower one than the training, because both need the cores of the host.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.data.tokens.build import BuildProgress
from forerun.data.tokens.store import index_entry
from forerun.data.tokens.unit import Unit, summary_of
from forerun.storage.folder import Folder

NICE = 10
WORKER = "forerun.data.tokens.worker"
POLL_SECONDS = 0.1  # between two looks for a unit
BUCKET_POLL_SECONDS = 2.0
SAY_AFTER_SECONDS = 2.0  # of waiting
SAY_EVERY_SECONDS = 60.0
CLOSE_SECONDS = 5.0

Build = Callable[[Callable[[BuildProgress], None]], None]  # builds a store and reports its progress
Say = Callable[[str], None]


class StoppedBuildError(Exception):
    """An error that ends a build whose run has ended. It also ends the wait for a unit."""


class UnitArrival:
    """The units of one part of the data, some of which may not exist yet.

    Args:
      name: the part, for messages.
      folder: the folder of the store.
      units: all units of the store, in order.
      entries: what the index has about each unit if the store is complete, else nothing.
    """

    def __init__(self, name: str, folder: Folder, units: Sequence[Unit], entries: Sequence[dict[str, Any]]) -> None:
        self.name, self.folder, self.units = name, folder, units
        self._title = name if name == "data" else f"data {name}"
        self._table = entries
        self._arrived: dict[int, bytes] = {}  # entries of other units, as JSON: a large store has many units
        self._documents = [0]  # training documents before each known unit, in order
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: BuildProgress | None = None
        self._said_at = time.monotonic()
        self._trains = False  # steps began, so the phase of the data is over
        self._say: Say = lambda text: None
        self._lock = threading.Lock()

    def start(self, build: Build, on_progress: Callable[[BuildProgress], None] | None = None) -> None:
        """Build the missing units in a thread."""

        def tell(progress: BuildProgress) -> None:
            if self._closed.is_set():
                raise StoppedBuildError
            self._progress = progress
            if on_progress is not None and not self._trains:
                on_progress(progress)
            now = time.monotonic()
            if now - self._said_at > SAY_EVERY_SECONDS:
                self._said_at = now
                self._say(f"{self._title}: {_described(progress)}")

        def work() -> None:
            try:
                build(tell)
                if self._progress is not None:
                    self._say(f"{self._title}: all {len(self.units)} units are tokenized")
            except StoppedBuildError:
                pass
            except BaseException as error:  # raised in the thread of the training
                self._error = error

        self._thread = threading.Thread(target=work, name="forerun-early-build", daemon=True)
        self._thread.start()

    def speak(self, say: Say) -> None:
        """Show the progress and waits from now on with `say`, which is called by other threads."""
        self._say, self._said_at, self._trains = say, time.monotonic(), True

    def raise_failure(self) -> None:
        """Raise the error of the build if it failed."""
        if self._error is not None:
            raise self._error

    def entries(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return what an index has about the units `start` .. `stop - 1`. Wait until they exist.

        Raises:
          UserError: the build failed.
        """
        return [self._entry(number) for number in range(start, stop)]

    def documents_before(self, unit: int) -> int:
        """Return the number of training documents in the units before this one, which exist."""
        with self._lock:
            while len(self._documents) <= unit:
                entry = self._entry(len(self._documents) - 1)
                self._documents.append(self._documents[-1] + entry["sides"]["train"]["documents"])
            return self._documents[unit]

    def close(self) -> None:
        """End the build and its workers. Finished units are kept."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)  # a daemon thread: one that does not answer ends with the process

    def _entry(self, number: int) -> dict[str, Any]:
        if number < len(self._table):
            return self._table[number]
        if number not in self._arrived:
            self._arrived[number] = json.dumps(index_entry(self._wait(number))).encode()
        found: dict[str, Any] = json.loads(self._arrived[number])
        return found

    def _wait(self, number: int) -> dict[str, Any]:
        """Return the summary of a unit as soon as it exists."""
        began = time.monotonic()
        say_at = began + SAY_AFTER_SECONDS
        while True:
            self.raise_failure()
            if (summary := summary_of(Path(self.folder.address), self.units[number].name)) is not None:
                return summary
            if time.monotonic() > say_at:
                say_at = time.monotonic() + SAY_EVERY_SECONDS
                done = "" if self._progress is None else f"; {_described(self._progress)}"
                self._say(f"{self._title}: waiting for unit {number + 1} of {len(self.units)}{done}")
            if self._closed.wait(POLL_SECONDS if self.folder.is_local else BUCKET_POLL_SECONDS):
                raise StoppedBuildError(f"the run ended while it waited for {self.units[number].name}")


def lower_priority(word: str = WORKER) -> None:
    """Lower the priority of child processes whose command contains `word`. Do nothing on systems without /proc."""
    with suppress(OSError):
        children = [file.read_text("ascii").split() for file in Path("/proc/self/task").glob("*/children")]
        for child in {child for some in children for child in some}:
            with suppress(OSError):  # it has ended
                if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    for thread in os.listdir(f"/proc/{child}/task"):  # Linux has priorities of threads
                        os.setpriority(os.PRIO_PROCESS, int(thread), NICE)


def _described(progress: BuildProgress) -> str:
    share = progress.done_bytes / max(1, progress.total_bytes)
    return f"{progress.units_done} of {progress.units} units tokenized ({share:.0%})"
