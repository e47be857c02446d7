"""A pool of worker processes that build units.

Workers start when there is work, are replaced if they die, and end with the build.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from forerun import version
from forerun.data.tokens.memory import is_exhausted
from forerun.data.tokens.unit import Unit
from forerun.interrupt import children_without_ctrl_c

ATTEMPTS = 3
# With a backtrace, Rust needs half a minute to report a failed allocation.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
WORKER = ("-P", "-m", "forerun.data.tokens.worker")


class Event(NamedTuple):
    """A message about a unit.

    `kind` is progress, done, bad, error, storage, bug or died. The last one means that the worker died and the unit
    is not tried again.
    """

    kind: str
    unit: Unit
    content: Any


class Pool:
    """A pool that assigns units to workers in order. Their events arrive in any order."""

    def __init__(self, units: Sequence[Unit], task: dict[str, Any], workers: int) -> None:
        self._waiting = list(reversed(units))
        self._task = task
        self._lock = threading.Lock()
        self._deaths: dict[int, int] = {}
        self._limit: int | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._processes: set[subprocess.Popen[str]] = set()
        self._ended = False
        many = max(1, min(workers, len(units)))
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(many)]

    def events(self) -> Iterator[Event]:
        """Start the workers and yield events until every assigned unit is finished or has failed."""
        for thread in self._threads:
            thread.start()
        left = len(self._threads)
        try:
            while left:
                event = self._events.get()
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            self.end()

    def up_to(self, unit: Unit) -> None:
        """Assign no more units after this one."""
        with self._lock:
            self._limit = unit.number if self._limit is None else min(self._limit, unit.number)

    def end(self) -> None:
        """Kill all workers and wait for their threads."""
        with self._lock:
            self._ended = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _next(self) -> Unit | None:
        """Return the next unit to build, or None if there is none."""
        with self._lock:
            if self._ended or not self._waiting:
                return None
            return None if self._limit is not None and self._waiting[-1].number > self._limit else self._waiting.pop()

    def _serve(self) -> None:
        """Assign units to one worker process, and replace it if it dies. Each worker has a thread that runs this."""
        process: subprocess.Popen[str] | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr_file:
            try:
                while (unit := self._next()) is not None:
                    process = process or self._start(stderr_file)
                    if not self._send(process, unit):
                        code = self._stop(process)
                        process = None
                        self._died(unit, code, stderr_file)
            except BaseException as error:  # an exception in a thread would be lost
                if unit is not None and not self._ended:
                    about = {"where": None, "error": f"{type(error).__name__}: {error}", "trace": ""}
                    self._events.put(Event("bug", unit, about))
            finally:
                if process is not None:
                    self._stop(process)
                self._events.put(None)

    def _send(self, process: subprocess.Popen[str], unit: Unit) -> bool:
        """Send a unit to a worker and queue its messages. Return False if it ended without a final message."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(unit.to_json()) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            try:
                ((kind, content),) = json.loads(line).items()
            except ValueError:  # the worker died in the middle of a line
                return False
            self._events.put(Event(kind, unit, content))
            if kind != "progress":
                return True
        return False

    def _died(self, unit: Unit, code: int, stderr_file: IO[str]) -> None:
        """Assign the unit again after its worker died, or queue a `died` event after the last attempt."""
        stderr_file.seek(0)
        said = stderr_file.read()
        with self._lock:
            if self._ended:
                return
            self._deaths[unit.number] = self._deaths.get(unit.number, 0) + 1
            # The same texts would need the same memory again.
            again = self._deaths[unit.number] < ATTEMPTS and not is_exhausted(code, said)
            if again:
                self._waiting.append(unit)
                self._waiting.sort(key=lambda one: -one.number)
        if not again:
            no_memory = is_exhausted(code, said)
            self._events.put(Event("died", unit, {"code": code, "said": said[-2000:], "no_memory": no_memory}))

    def _start(self, stderr_file: IO[str]) -> subprocess.Popen[str]:
        """Start a worker and send it the task. Its stderr is written to `stderr_file`."""
        package = str(Path(version.__file__).parent.parent)
        path = os.pathsep.join(
            dict.fromkeys([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        )
        with children_without_ctrl_c():
            process = subprocess.Popen(
                [sys.executable, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr_file,
                text=True,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": path} | QUIET,
            )
        with self._lock:
            self._processes.add(process)
            if self._ended:
                process.kill()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self._task) + "\n")
            process.stdin.flush()
        return process

    def _stop(self, process: subprocess.Popen[str]) -> int:
        """Close the stdin of a worker, which makes it exit, and return its exit code."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        process.stdout.close()
        with self._lock:
            self._processes.discard(process)
        return code
