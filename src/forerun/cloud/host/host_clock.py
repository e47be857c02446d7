"""The cloud's clock and the time since the start of a host, which no wrong answer and no restart sets back.

The clock of this machine and the answers of the cloud may be wrong. `time.monotonic` is not, but it starts again at
every boot. These rules follow:

- The time never runs slower than `monotonic`. A clock that is set back is ignored, so it cannot prolong a run.
- An answer that is more than `JUMP_SECONDS` ahead is believed only if `AGREEING_ANSWERS` answers in a row agree. One
  wrong answer therefore does not end a healthy run. A real jump, as after a reboot, is believed after some seconds.
- Until the cloud has answered for the first time, no time is known. After `first_answer_seconds`, the clock of this
  machine is used. The first answer of the cloud replaces it in both directions.
- The elapsed time follows `monotonic`, and the credible jumps of the cloud's clock. Both are kept on the disk.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.cloud.record.entries import Seconds, Time, Word
from forerun.cloud.record.read_entry import DamagedEntry, read_entry, write_entry
from forerun.files import atomic_write
from forerun.reporter import SILENT, Reporter

JUMP_SECONDS = 60.0
AGREEING_ANSWERS = 3
LATEST = 4_102_444_800.0  # the year 2100
LONGEST_SETUP_SECONDS = 86400.0  # between the start of billing and the first start of forerun on a host


@dataclass(frozen=True)
class SavedClock:
    """The state of a clock on the disk.

    Attributes:
      now: the time of the cloud's clock; None: not known yet.
      monotonic: the monotonic time of this state.
      boot: the ID of the boot that `monotonic` belongs to.
      ready_at: when billing began, by the API.
    """

    elapsed_seconds: Seconds
    monotonic: Seconds
    boot: Word = ""
    now: Time | None = None
    is_cloud: bool = False
    ready_at: Time | None = None


@dataclass(frozen=True)
class _Reading:
    """A time of the cloud's clock, and the monotonic time at which it was read."""

    at: float
    monotonic: float

    def expected(self, monotonic: float) -> float:
        return self.at + monotonic - self.monotonic


class HostClock:
    """Returns the time of the cloud's clock, and the time since this host started forerun. It never waits.

    Args:
      ask: asks the cloud for its time. It may take long or raise any exception.
      wall: this machine's clock.
      monotonic: the time since the boot of this machine.
      file: where the state is kept; None: nowhere.
      boot: the ID of this boot.
      reporter: receives what is ignored.
    """

    def __init__(
        self,
        ask: Callable[[], float],
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        file: Path | None = None,
        boot: str = "",
        first_answer_seconds: float = 60.0,
        reporter: Reporter = SILENT,
    ) -> None:
        self._ask, self._wall, self._monotonic = ask, wall, monotonic
        self._file, self._boot, self._first_answer_seconds, self._reporter = file, boot, first_answer_seconds, reporter
        self._lock = threading.Lock()
        self._known: _Reading | None = None
        self._is_cloud = False  # the cloud has answered: its time replaces that of this machine
        self._agreeing: list[_Reading] = []  # answers that contradict what is known, but not each other
        self._ready_at: float | None = None
        self._trouble = ""
        self._started = self._since = monotonic()  # the elapsed time is counted from `_since`
        self._elapsed = 0.0
        self._restore()

    def refresh(self) -> str:
        """Ask the cloud. Return an empty string, or why its answer is not used."""
        try:
            answer = float(self._ask())
        except Exception as error:  # whatever fails, the agent must still enforce the deadline
            return f"{type(error).__name__}: {error}"
        if not 0.0 <= answer <= LATEST:
            return f"{answer} is no time"
        with self._lock:
            return self._receive(_Reading(answer, self._monotonic()))

    def _receive(self, answer: _Reading) -> str:
        expected = self._wall() if self._known is None else self._known.expected(answer.monotonic)
        ahead = answer.at - expected
        if self._is_cloud and ahead <= 0.0:
            self._agreeing = []
            return "" if ahead >= -JUMP_SECONDS else "the clock was set back, which is ignored"
        if abs(ahead) > JUMP_SECONDS:
            previous = self._agreeing[-1:]
            is_same = all(abs(answer.at - reading.expected(answer.monotonic)) <= JUMP_SECONDS for reading in previous)
            self._agreeing = [*self._agreeing, answer] if is_same else [answer]
            if len(self._agreeing) < AGREEING_ANSWERS:
                return "the clock jumped, which is not believed yet"
        self._agreeing = []
        if self._is_cloud:
            self._elapsed += ahead
        self._known, self._is_cloud = answer, True
        return ""

    @property
    def is_contradicted(self) -> bool:
        """Whether the last answer must be confirmed by more answers."""
        with self._lock:
            return bool(self._agreeing)

    def now(self) -> float | None:
        """Return the time in seconds since 1970, or None if it is not known yet."""
        with self._lock:
            monotonic = self._monotonic()
            if self._known is None and monotonic - self._started >= self._first_answer_seconds:
                self._known = _Reading(self._wall(), monotonic)
            return None if self._known is None else self._known.expected(monotonic)

    def elapsed_seconds(self) -> float:
        """Return the time since the first start of forerun on this host, also over reboots."""
        with self._lock:
            return self._elapsed + self._monotonic() - self._since

    @property
    def ready_at(self) -> float | None:
        """The time at which billing began, by the API; None: not known yet."""
        return self._ready_at

    def set_ready(self, at: float) -> None:
        """Keep when billing began. The first known time stays.

        Raises:
          ValueError: billing cannot have begun at this time: it is in the future, or long before the start of forerun.
        """
        now = self.now()
        earliest = math.inf if now is None else now - self.elapsed_seconds() - LONGEST_SETUP_SECONDS
        if now is None or not earliest <= at <= now + JUMP_SECONDS:
            raise ValueError(f"billing cannot have begun at {at}")
        if self._ready_at is None:
            self._ready_at = at

    def save(self) -> None:
        """Write the state to the disk. A disk that is full or broken is reported once; the clock continues."""
        if self._file is None:
            return
        with self._lock:
            monotonic = self._monotonic()
            elapsed = self._elapsed + monotonic - self._since
            now = None if self._known is None else self._known.expected(monotonic)
            is_cloud, ready_at = self._is_cloud, self._ready_at
        try:
            atomic_write(self._file, write_entry(SavedClock(elapsed, monotonic, self._boot, now, is_cloud, ready_at)))
            trouble = ""
        except OSError as error:
            trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            self._reporter.info(f"{self._file.name}: {trouble or 'can be written again'}")
        self._trouble = trouble

    def _restore(self) -> None:
        if self._file is None:
            return
        try:
            state = read_entry(SavedClock, str(self._file), self._file.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            state = DamagedEntry(str(self._file), str(error))
        if isinstance(state, DamagedEntry):
            # forerun ran on this host before. The time since the boot is at most minutes more than what was lost.
            self._elapsed = self._since
            self._reporter.info(f"{state}; the time since the boot is used")
            return
        is_same_boot = state.boot == self._boot and state.monotonic <= self._since
        # After a reboot, the time of this boot is certain. An answer of the cloud adds the time before it.
        gap = self._since - (state.monotonic if is_same_boot else 0.0)
        self._elapsed = state.elapsed_seconds + gap
        self._ready_at = state.ready_at
        if state.now is not None:
            self._known, self._is_cloud = _Reading(state.now + gap, self._since), state.is_cloud
