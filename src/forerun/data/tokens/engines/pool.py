"""A pool of worker processes that build units.

Workers start when there is work, are replaced if they die, and end with the build.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from forerun.data.tokens.engines.engine import ATTEMPTS, Event, in_order
from forerun.data.tokens.engines.worker_process import WorkerProcess
from forerun.data.tokens.unit import Unit


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
