"""A thread that reports a long phase at regular intervals, for displays that cannot redraw a line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

HEARTBEAT_SECONDS = 30.0


class EndSignal(Protocol):
    """The part of `threading.Event` that a heartbeat uses."""

    def set(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`. Return False after `timeout` seconds without it."""
        ...


class Heartbeat:
    """Calls `report` every 30 seconds, until `stop` is called.

    Args:
      report: prints one line. A separate thread calls it.
      end: the event that ends the thread.
    """

    def __init__(self, report: Callable[[], None], end: EndSignal) -> None:
        self._report, self._end = report, end
        # A daemon, so that a process that ends during a phase does not wait for it.
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No line is printed after this call returns."""
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            self._report()
