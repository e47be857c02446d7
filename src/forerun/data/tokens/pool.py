"""Worker processes for units: started when there is work, replaced when they die, ended with the build."""

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

import forerun
from forerun.data.tokens.memory import is_exhausted
from forerun.data.tokens.unit import Unit
from forerun.interrupt import children_without_ctrl_c

ATTEMPTS = 3
# Rust would need half a minute to describe where an allocation failed.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
WORKER = ("-P", "-m", "forerun.data.tokens.worker")


class Event(NamedTuple):
    """`kind` is progress, done, bad, error, storage, bug or died (the third time)."""

    kind: str
    unit: Unit
    content: Any


class Pool:
    """Hands out units in order, and says what becomes of them in any order."""

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
        """Until every unit that was handed out is answered for."""
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
        """Hand out no unit behind this one any more."""
        with self._lock:
            self._limit = unit.number if self._limit is None else min(self._limit, unit.number)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _next(self) -> Unit | None:
        with self._lock:
            if self._ended or not self._waiting:
                return None
            return None if self._limit is not None and self._waiting[-1].number > self._limit else self._waiting.pop()

    def _serve(self) -> None:
        """One worker process after the other, as long as there are units."""
        process: subprocess.Popen[str] | None = None
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
            try:
                while (unit := self._next()) is not None:
                    process = process or self._start(complaints)
                    if not self._ask(process, unit):
                        code = self._stop(process)
                        process = None
                        self._died(unit, code, complaints)
            except BaseException as error:  # nobody looks at a thread's error
                if unit is not None and not self._ended:
                    about = {"where": None, "error": f"{type(error).__name__}: {error}", "trace": ""}
                    self._events.put(Event("bug", unit, about))
            finally:
                if process is not None:
                    self._stop(process)
                self._events.put(None)

    def _ask(self, process: subprocess.Popen[str], unit: Unit) -> bool:
        """False if the process ended before it answered."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(unit.to_json()) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            try:
                ((kind, content),) = json.loads(line).items()
            except ValueError:  # cut off by its end
                return False
            self._events.put(Event(kind, unit, content))
            if kind != "progress":
                return True
        return False

    def _died(self, unit: Unit, code: int, complaints: IO[str]) -> None:
        complaints.seek(0)
        said = complaints.read()
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

    def _start(self, complaints: IO[str]) -> subprocess.Popen[str]:
        package = str(Path(forerun.__file__).parent.parent)
        path = os.pathsep.join(
            dict.fromkeys([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
        )
        with children_without_ctrl_c():
            process = subprocess.Popen(
                [sys.executable, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
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
        """Closing its stdin ends it."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        process.stdout.close()
        with self._lock:
            self._processes.discard(process)
        return code
