"""The worker's pulse: a word to the supervisor whenever something has moved. A heartbeat beats also in a stuck process;
this does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forerun.supervise.channel import Channel
from forerun.supervise.stop import Stop


class Pulse:
    """Thread-safe, and it never waits. Phases with limits of their own stand in `limits.PHASE_SECONDS`."""

    def __init__(self, channel: Channel, stop: Stop) -> None:
        self._channel, self._stop = channel, stop

    def phase(self, name: str) -> None:
        """What begins now: `data`, `compile`, `restore`, `save`, `evaluate`, `finish` or another word."""
        self._channel.tell(kind="phase", name=name, units=self._stop.units)

    def step(self, number: int) -> None:
        """Step `number` is done: its figures have arrived, so every host took part in it."""
        self._channel.tell(kind="step", step=number, units=self._stop.units)

    def saved(self, seconds: float) -> None:
        """A save took this long from its start to its commit: the estimate for one inside a grace time."""
        self._stop.save_seconds = seconds
        self._channel.tell(kind="saved", seconds=seconds, units=self._stop.units)

    def fact(self, name: str, value: str) -> None:
        """Something that must be the same on all hosts (`data digest`): if not, the job ends and says who differs."""
        self._channel.say(kind="fact", name=name, value=value)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """This host waits for something of its own (`data`), so the others may have to wait for it.

        When all hosts have agreed to stop here, the wait ends with `Stopped`. Main thread only.
        """
        self._channel.tell(kind="waiting", what=what, units=self._stop.units)
        with self._stop.interrupting():
            yield
