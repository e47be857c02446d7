"""The progress of one worker, as its supervisor tracks it: phase, steps, and time without progress."""

from __future__ import annotations

import math
from collections import deque

from forerun.supervise.protocol.limits import Limits
from forerun.supervise.protocol.messages import DeviceBytes, FromWorker, Phase, Saved, Step, Unit, Waiting
from forerun.supervise.protocol.worker_state import STEP, WorkerView

RECENT = 200  # step times that the percentile is computed from
FEW = 5  # with fewer step times than this, the percentile means nothing
STOPPED_BY_SIGNAL = "T"  # the state in /proc/PID/stat


class WorkerProgress:
    """The progress of one worker, updated from its messages. `now` is the time of a monotonic clock, in seconds."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._heard = now
        self._stepped: float | None = None
        self._warm = False  # the first step after another phase is unusually slow, so its time is not measured
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self.phase, self.step, self.units = "start", 0, 0
        self._before_wait: str | None = None
        self._halted: float | None = None  # when the process was first seen stopped by a signal
        self.save_seconds: float | None = None
        self._device_memory: DeviceBytes | None = None

    def hear(self, message: FromWorker, now: float) -> None:
        """Record a message of the worker. A message about progress restarts the time without progress."""
        match message:
            case Phase():
                self.phase, self._stepped, self._warm = message.name, None, False
            case Waiting():
                self._before_wait, self.phase = self._before_wait or self.phase, f"waiting for {message.what}"
            case Step():
                if self._stepped is not None and self._warm:
                    self._seconds.append(now - self._stepped)
                self._warm = self._stepped is not None
                self.phase, self.step, self._stepped = STEP, message.step, now
            case Saved():
                self.save_seconds = message.seconds
            case DeviceBytes():  # no progress: a thread could send it from a process that hangs
                self._device_memory = message
                return
            case Unit():
                self.phase = self._before_wait or self.phase
            case _:
                return
        if not isinstance(message, Waiting | Saved):
            self._before_wait = None
        self.units, self._heard = message.units, now

    def excuse(self, away_seconds: float, now: float) -> None:
        """Exclude `away_seconds`, in which the supervisor did not run, from the time without progress.

        The worker may have been suspended too, and its messages were not read.
        """
        self._heard = min(now, self._heard + away_seconds)
        if self._halted is not None:
            self._halted = min(now, self._halted + away_seconds)

    def step_seconds(self) -> float:
        """Return the 99th percentile of recent step times in seconds, or 0 if no step was measured."""
        if not self._seconds:
            return 0.0
        return sorted(self._seconds)[math.ceil(0.99 * len(self._seconds)) - 1]

    def limit_seconds(self) -> float:
        """Return how long the worker may report no progress in its current phase."""
        if self.phase != STEP:
            return self._limits.phase_seconds(self.phase)
        if len(self._seconds) < FEW:
            return self._limits.phase_seconds("first steps")
        return self._stall_seconds()

    def _stall_seconds(self) -> float:
        """Return how long a worker that makes steps may report none. See `Limits`."""
        limits = self._limits
        return limits.stall * max(limits.stall_floor, limits.stall_steps * self.step_seconds())

    def view(
        self, now: float, *, state: str, cpu_seconds: float, alive: bool, resident_bytes: int | None = None
    ) -> WorkerView:
        """Return the progress at `now`. `state`, `cpu_seconds`, `alive` and `resident_bytes` describe the process."""

        # A process that a signal stopped makes no progress, even in a phase that has a limit of hours.
        self._halted = (self._halted if self._halted is not None else now) if state == STOPPED_BY_SIGNAL else None
        device = self._device_memory
        return WorkerView(
            phase=self.phase,
            step=self.step,
            units=self.units,
            silent_seconds=now - self._heard,
            limit_seconds=self.limit_seconds(),
            state=state,
            cpu_seconds=cpu_seconds,
            save_seconds=self.save_seconds,
            step_seconds=self.step_seconds(),
            alive=alive,
            halted=self._halted is not None and now - self._halted > self._stall_seconds(),
            memory="HBM" if device else "RAM",
            memory_bytes=device.bytes if device else resident_bytes,
            memory_limit_bytes=(device.limit or None) if device else None,
        )
