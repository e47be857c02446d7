"""An announced stop as the worker sees it: all hosts leave between the same two pieces of work.

A unit is a piece of work that all hosts do together: a step, a batch of an evaluation. Every host asks `go()` before
each of them, so every host counts alike. When a stop is announced, each worker says how many units it has begun and
begins no other until the leader has answered with the largest of these numbers: up to there everybody goes on (what one
has begun cannot end without the others), and nobody goes further. The answer comes from a thread of its own, so a main
thread that waits inside a collective does not hold it up.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forerun.supervise.channel import Channel

MARGIN = 1.5
MARGIN_SECONDS = 1.0


class Stopped(BaseException):  # like KeyboardInterrupt: nobody should take it for an error to be tried again
    """Raised out of a wait, when all hosts have agreed to stop here."""


def save_fits(save_seconds: float | None, remaining_seconds: float, step_seconds: float = 0.0) -> bool:
    """Whether a save can be committed before the grace time ends.

    Without an estimate it is tried: no save has ended yet, so everything would be lost, and a save that is cut off
    leaves the older ones as they were.
    """
    if save_seconds is None:
        return remaining_seconds > MARGIN_SECONDS
    return step_seconds + MARGIN * save_seconds + MARGIN_SECONDS <= remaining_seconds


class Stop:
    def __init__(
        self, channel: Channel, leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._leave, self._clock = channel, leave, clock
        self._changed = threading.Condition()
        self._units, self._last = 0, -1
        self._asked = self._save = self._waits = False
        self._deadline: float | None = None
        self.save_seconds: float | None = None  # of the last save, if there was one

    @property
    def units(self) -> int:
        return self._units

    @property
    def save(self) -> bool:
        """Whether there is time for a save; the same answer on all hosts. False before a stop."""
        return self._save

    def go(self) -> bool:
        """Before each unit of common work, on every host alike: False if all hosts stop here."""
        with self._changed:
            while self._asked and self._last < 0:
                self._changed.wait()
            if self._due():
                return False
            self._units += 1
            units = self._units
        self._channel.tell(kind="unit", units=units)
        return True

    def due(self) -> bool:
        """Whether this is where all hosts stop. Waits for nobody."""
        with self._changed:
            return self._due()

    def remaining_seconds(self) -> float | None:
        """Of the grace time; None if no stop was announced."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def ask(self, grace_seconds: float) -> None:
        """By the listening thread: how far has this worker come?"""
        with self._changed:
            if self._last < 0:
                self._asked, self._deadline = True, self._clock() + grace_seconds
            units = self._units
        self._channel.say(kind="begun", units=units)

    def decide(self, last: int, save: bool, grace_seconds: float) -> None:
        """By the listening thread: unit `last` is the last one, on all hosts."""
        with self._changed:
            self._last, self._save, self._deadline = last, save, self._clock() + grace_seconds
            self._changed.notify_all()
            unbegun, interrupts = self._units == last == 0, self._waits and self._due()
        if (
            unbegun
        ):  # still reading or compiling: there is nothing to save, and the main thread may not look for minutes
            self._leave()
        elif interrupts:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def here(self, grace_seconds: float, *, save: bool | None = None) -> None:
        """For a process without a supervisor, which has nobody to agree with: after the unit that was begun.

        `save` says whether to try a save; without it, one is tried if it fits into the grace time.
        """
        with self._changed:
            units = self._units
            self._asked = True
        if save is None:
            save = save_fits(self.save_seconds, grace_seconds)
        self.decide(units, save, grace_seconds)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        self._waits = True
        try:
            if self._due():
                raise Stopped
            yield
        finally:
            self._waits = False

    def interrupt(self, *_: object) -> None:
        """The handler of SIGUSR2, in the main thread."""
        if self._waits and self._due():
            raise Stopped

    def _due(self) -> bool:
        return 0 <= self._last <= self._units
