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
from typing import Self, TextIO

from forerun.safe_text import clean
from forerun.track.display.display import Phase, StepView
from forerun.track.display.heartbeat import EndSignal, Heartbeat

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
