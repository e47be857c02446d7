"""The worker's reports of progress to its supervisor. Unlike a heartbeat, they stop when the process hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forerun.supervise.protocol.channel import Channel
from forerun.supervise.protocol.messages import DeviceBytes, Fact, Phase, Saved, Step, Waiting
from forerun.supervise.worker.stop import Stop

MEMORY_SECONDS = 2.0  # at least, between two reports of memory


class ProgressReporter:
    """The reports of a worker. Its methods are thread-safe, and all except `fact` never wait.

    `limits.PHASE_SECONDS` defines how long each phase may last.
    """

    def __init__(self, channel: Channel, stop: Stop) -> None:
        self._channel, self._stop = channel, stop
        self._memory: Callable[[], tuple[int, int | None] | None] = lambda: None
        self._memory_due = 0.0

    def measure_memory(self, read: Callable[[], tuple[int, int | None] | None]) -> None:
        """Report the memory of devices with steps, at most every `MEMORY_SECONDS`.

        `read` returns the bytes in use and the limit of the fullest device, or None if they are unknown.
        """
        self._memory = read

    def phase(self, name: str) -> None:
        """Report the start of a phase: `data`, `compile`, `restore`, `save`, `evaluate`, `finish` or another name."""
        self._channel.tell(Phase(name, self._stop.units))

    def step(self, number: int) -> None:
        """Report that step `number` is done. Its metrics have arrived, so every host took part in it."""
        self._channel.tell(Step(number, self._stop.units))
        if (now := time.monotonic()) >= self._memory_due:
            self._memory_due = now + MEMORY_SECONDS
            if (memory := self._memory()) is not None:
                self._channel.tell(DeviceBytes(memory[0], memory[1] or 0))

    def saved(self, seconds: float) -> None:
        """Report the time of a save from its start to its commit. It is the estimate for a save before a stop."""
        self._stop.save_seconds = seconds
        self._channel.tell(Saved(seconds, self._stop.units))

    def fact(self, name: str, value: str) -> None:
        """Report a value that must be equal on all hosts, such as `data digest`. A difference ends the job."""
        self._channel.say(Fact(name, value))

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Report that this host waits inside the block for something local, such as `data`.

        The other hosts wait for this one. If all hosts agree to stop here, `Stopped` is raised inside the block. Main
        thread only.
        """
        self._channel.tell(Waiting(what, self._stop.units))
        with self._stop.interrupting():
            yield
