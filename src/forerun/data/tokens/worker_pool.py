"""Engines, which build units, and the engine of one machine: a pool of worker processes.

Workers start when there is work, are replaced if they die, and end with the build. The other engine is that of a
cluster (`ray_cluster.py`).
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
from typing import Any, NamedTuple, Protocol

from forerun import version
from forerun.data.tokens.memory import is_exhausted
from forerun.data.tokens.unit import Unit
from forerun.interrupt import children_without_ctrl_c

ATTEMPTS = 3  # for a unit whose worker dies


class Event(NamedTuple):
    """A message about a unit.

    `kind` is progress, done, bad, error, storage, bug or died. The last one means that the worker died and the unit
    is not tried again.
    """

    kind: str
    unit: Unit
    content: Any


class UnitEngine(Protocol):
    """A builder of units. It starts units in order. Their events arrive in any order."""

    def events(self) -> Iterator[Event]:
        """Start the work and yield events until every unit is finished or has failed."""

    def up_to(self, unit: Unit) -> None:
        """Start no more units after this one."""

    def end(self) -> None:
        """Stop all work. Units that are not finished are abandoned."""


class StartEngine(Protocol):
    """A function that returns an engine for units, a task in types of JSON, and a number of workers."""

    def __call__(self, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> UnitEngine: ...


def in_order(units: list[Unit]) -> None:
    """Sort units that wait, so that the next one is the last of the list."""
    units.sort(key=lambda one: -one.number)


# With a backtrace, Rust needs half a minute to report a failed allocation.
QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
WORKER = ("-P", "-m", "forerun.data.tokens.worker")
SAID_CHARACTERS = 2000  # of the last output on stderr that a message about a death contains


class WorkerProcess:
    """A running worker process. It exits when this process ends, because its stdin is then closed.

    `folder` is its working folder, by default that of this process.
    """

    def __init__(self, task: dict[str, Any], folder: str | None = None) -> None:
        self._task: dict[str, Any] | None = task
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # until `_end`
        with children_without_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, *WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                encoding="utf-8",
                env=_environment(),
                cwd=folder,
            )

    def messages(self, unit: Unit) -> Iterator[tuple[str, Any]]:
        """Build a unit, and yield the kind and the content of each message about it.

        The last message is not `progress`. It is `died` if the process ended without a final message, with its exit
        code, its last output on stderr, and whether an allocation of memory failed. The process is stopped then.
        """
        assert self._process.stdout is not None
        self._send(unit)
        for line in self._process.stdout:
            try:
                ((kind, content),) = json.loads(line).items()
            except ValueError:  # the process died in the middle of a line
                break
            yield kind, content
            if kind != "progress":
                return
        code, said = self._end()
        yield "died", {"code": code, "said": said[-SAID_CHARACTERS:], "no_memory": is_exhausted(code, said)}

    def kill(self) -> None:
        """Kill the process. Safe from any thread; `messages` then yields `died`."""
        self._process.kill()

    def stop(self) -> None:
        """Let the process exit, and wait for it."""
        self._end()

    def _send(self, unit: Unit) -> None:
        """Write a unit to the process, and before the first unit the task."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            if self._task is not None:
                task, self._task = self._task, None
                self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.write(json.dumps(unit.to_json()) + "\n")
            self._process.stdin.flush()

    def _end(self) -> tuple[int, str]:
        """Close stdin, which makes the process exit, and return its exit code and its output on stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        if self._stderr.closed:
            return code, ""
        with self._stderr:
            self._stderr.seek(0)
            return code, self._stderr.read()


def _environment() -> dict[str, str]:
    """Return the environment of a worker, in which this version of forerun can be imported."""
    package = str(Path(version.__file__).parent.parent)
    path = dict.fromkeys([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | QUIET


class Pool:
    """The engine of one machine: worker processes, by default one per core."""

    def __init__(self, units: Sequence[Unit], task: dict[str, Any], workers: int | None) -> None:
        self._waiting = list(reversed(units))
        self._task = task
        self._lock = threading.Lock()
        self._deaths: dict[int, int] = {}
        self._limit: int | None = None
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._processes: set[WorkerProcess] = set()
        self._ended = False
        many = max(1, min(workers or _cores(), len(units)))
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
        process: WorkerProcess | None = None
        try:
            while (unit := self._next()) is not None:
                process = process or self._start()
                for kind, content in process.messages(unit):
                    if kind != "died":
                        self._events.put(Event(kind, unit, content))
                    elif process is not None:
                        self._forget(process)
                        process = None
                        self._died(unit, content)
        except BaseException as error:  # an exception in a thread would be lost
            if unit is not None and not self._ended:
                about = {"where": None, "error": f"{type(error).__name__}: {error}", "trace": ""}
                self._events.put(Event("bug", unit, about))
        finally:
            if process is not None:
                process.stop()
                self._forget(process)
            self._events.put(None)

    def _died(self, unit: Unit, content: dict[str, Any]) -> None:
        """Assign the unit again after its worker died, or queue a `died` event after the last attempt."""
        with self._lock:
            if self._ended:
                return
            self._deaths[unit.number] = self._deaths.get(unit.number, 0) + 1
            # The same texts would need the same memory again.
            again = self._deaths[unit.number] < ATTEMPTS and not content["no_memory"]
            if again:
                self._waiting.append(unit)
                in_order(self._waiting)
        if not again:
            self._events.put(Event("died", unit, content))

    def _start(self) -> WorkerProcess:
        """Start a worker. `end` may run in another thread at the same time: it kills the worker, or this does."""
        process = WorkerProcess(self._task)
        with self._lock:
            self._processes.add(process)
            if self._ended:
                process.kill()
        return process

    def _forget(self, process: WorkerProcess) -> None:
        with self._lock:
            self._processes.discard(process)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
