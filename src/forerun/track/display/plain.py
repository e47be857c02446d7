"""The display for pipes, files and CI.

It prints the first and the last step, and a line every 10 seconds or 10 %. A phase prints a line every 30 seconds,
so that a long compilation is not taken for a hang.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TextIO

from forerun.safe_text import clean
from forerun.track.display.display import Phase, StepView

HEARTBEAT_SECONDS = 30.0
EVERY_SECONDS = 10.0
LINES_PER_RUN = 10


class PlainDisplay:
    """A display that prints plain lines.

    Args:
      stream: receives the lines.
      clock: returns the time in seconds.
      new_end: creates the event that ends the heartbeat of a phase. Tests replace it.
    """

    def __init__(
        self, stream: TextIO, *, clock: Callable[[], float], new_end: Callable[[], EndSignal] = threading.Event
    ) -> None:
        self._stream, self._clock, self._new_end = stream, clock, new_end
        self._write_lock = threading.Lock()  # heartbeats print from their own thread
        self._shown_at = -math.inf
        self._shown_tenth = -1

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        phase = Phase(name, detail, self._clock)
        self._announce("  ".join(part for part in (f"{name} ...", detail) if part))
        heartbeat = Heartbeat(lambda: self.say(phase.running()), self._new_end())
        try:
            yield phase
        except BaseException:
            heartbeat.stop()
            self.say(phase.closing(failed=True))
            raise
        heartbeat.stop()
        self.say(phase.closing(failed=False))

    def _announce(self, text: str) -> None:
        """Show that a phase has started."""
        self.say(text)

    def step(self, view: StepView) -> None:
        now = self._clock()
        tenth = view.step * LINES_PER_RUN // view.steps
        due = now - self._shown_at >= EVERY_SECONDS or tenth > self._shown_tenth
        if not due and view.step < view.steps:
            return
        self._shown_at, self._shown_tenth = now, tenth
        self.say("  ".join((f"step {view.step}/{view.steps}", *view.figures(), view.eta())))

    def say(self, text: str) -> None:
        with self._write_lock:
            self._stream.write(f"{clean(text)}\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def close(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EndSignal(Protocol):
    """The part of `threading.Event` that a heartbeat uses."""

    def set(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`. Return False after `timeout` seconds without it."""
        ...


class Heartbeat:
    """Reports a long phase: calls `report` every 30 seconds, until `stop` is called.

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
