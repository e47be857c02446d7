"""Announced stops in the worker: all hosts stop after the same unit of work.

A unit is a piece of work that all hosts do together, such as a step or a batch of an evaluation. Every host calls
`go()` before each unit, so all hosts count the same units. After the announcement of a stop:

1. Each worker reports how many units it has begun, and begins no other one.
2. The leader answers with the largest of these numbers.
3. All workers continue up to this number, because a unit that one host has begun cannot end without the others.

A separate thread sends the report, so a main thread that waits inside a collective does not delay it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forerun.supervise.protocol.channel import Channel
from forerun.supervise.protocol.messages import Unit, WorkerUnits

# A save may take longer than the last one: by this factor, and by these seconds.
MARGIN = 1.5
MARGIN_SECONDS = 1.0


class Stopped(BaseException):  # like KeyboardInterrupt, it must not be caught and retried as an error
    """Raised in the main thread during a wait, when all hosts have agreed to stop here."""


def save_fits(save_seconds: float | None, remaining_seconds: float, step_seconds: float = 0.0) -> bool:
    """Return whether a save can be committed before the grace time ends.

    Without an estimate (`save_seconds` is None), a save is tried if more than MARGIN_SECONDS remain. No save has been
    completed yet, so all work would be lost without it, and an interrupted save does not damage older ones.
    """
    if save_seconds is None:
        return remaining_seconds > MARGIN_SECONDS
    return step_seconds + MARGIN * save_seconds + MARGIN_SECONDS <= remaining_seconds


class Stop:
    """The state of an announced stop. The main thread and the listening thread share it.

    `leave` ends the process. It is called if a stop is decided before the first unit.
    """

    def __init__(
        self, channel: Channel, leave: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel, self._leave, self._clock = channel, leave, clock
        self._changed = threading.Condition()
        self._units, self._last = 0, -1  # the last unit is -1 until it is decided
        self._asked = self._save = self._waits = False
        self._deadline: float | None = None
        self._ends_job = True
        self.save_seconds: float | None = None  # of the last completed save

    @property
    def units(self) -> int:
        """The number of units that this worker has begun."""
        return self._units

    @property
    def save(self) -> bool:
        """Whether there is time for a last save. It is equal on all hosts, and False before a stop."""
        return self._save

    @property
    def ends_job(self) -> bool:
        """Whether the job ends with this stop. Otherwise another attempt follows, with more slices."""
        return self._ends_job

    def go(self) -> bool:
        """Begin a unit and return True, or return False if all hosts stop here.

        Every host calls this before each unit of common work. It waits while a stop is announced but not decided.
        """
        with self._changed:
            while self._asked and self._last < 0:
                self._changed.wait()
            if self._due():
                return False
            self._units += 1
            units = self._units
        self._channel.tell(Unit(units))
        return True

    def due(self) -> bool:
        """Return whether all hosts stop here, without waiting."""
        with self._changed:
            return self._due()

    def remaining_seconds(self) -> float | None:
        """Return the rest of the grace time in seconds, or None if no stop was announced."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def ask(self, grace_seconds: float) -> None:
        """Report how many units this worker has begun. The listening thread calls this."""
        with self._changed:
            if self._last < 0:
                self._asked, self._deadline = True, self._clock() + grace_seconds
            units = self._units
        self._channel.say(WorkerUnits(units))

    def decide(self, last: int, save: bool, grace_seconds: float, *, ends_job: bool = True) -> None:
        """Make unit `last` the last one, as on all hosts. The listening thread calls this."""
        with self._changed:
            self._last, self._save, self._deadline = last, save, self._clock() + grace_seconds
            self._ends_job = ends_job
            self._changed.notify_all()
            unbegun, interrupts = self._units == last == 0, self._waits and self._due()
        # Before the first unit there is nothing to save, and the main thread may compile for minutes before `go`.
        if unbegun:
            self._leave()
        elif interrupts:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def here(self, grace_seconds: float, *, save: bool | None = None) -> None:
        """Stop after the current unit. For a process without a supervisor, which has no other hosts to agree with.

        `save` selects whether to save. If it is None, a save is made if it fits into the grace time.
        """
        with self._changed:
            units = self._units
            self._asked = True
        if save is None:
            save = save_fits(self.save_seconds, grace_seconds)
        self.decide(units, save, grace_seconds)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Stopped inside the block as soon as all hosts have agreed to stop here."""
        self._waits = True
        try:
            if self._due():
                raise Stopped
            yield
        finally:
            self._waits = False

    def interrupt(self, *_: object) -> None:
        """Raise Stopped if the main thread waits and the stop is due. This is the handler of SIGUSR2."""
        if self._waits and self._due():
            raise Stopped

    def _due(self) -> bool:
        return 0 <= self._last <= self._units
