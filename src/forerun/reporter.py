"""Messages and progress of a command: every function that reports something takes a `Reporter`.

The default, `SILENT`, ignores everything. `LineReporter` prints plain lines, for pipes, files and CI. The live displays
of a terminal and a notebook are in `forerun.track.display`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from forerun.progress import ProgressBar, TaskProgress
from forerun.safe_text import clean, redact
from forerun.units import Count, Seconds

HEARTBEAT_SECONDS = 30.0
STEP_SECONDS = 10.0
STEP_LINES = 10


@dataclass(frozen=True)
class StepView:
    """The metrics of a finished training step that a reporter shows. `step` counts from 1 to `steps`."""

    step: int
    steps: int
    loss: float | None  # None: no token of the batch has a loss
    tokens_per_second: float
    mfu: float | None  # share of the peak FLOP/s of the chips, from 0 to 1
    eta_seconds: float
    wait_share: float  # share of the time spent waiting for data, from 0 to 1
    lr: float
    grad_norm: float

    def figures(self) -> list[str]:
        """Return the metrics as texts, the most important first."""
        return [
            "no token with a loss" if self.loss is None else f"loss {self.loss:.4f}",
            f"{Count(round(self.tokens_per_second))} tok/s",
            *([] if self.mfu is None else [f"MFU {self.mfu:.1%}"]),
            f"data wait {self.wait_share:.1%}",
            f"lr {self.lr:.2e}",
            f"grad {self.grad_norm:.3g}",
        ]

    def eta(self) -> str:
        """Return the remaining time as a text, or "done" after the last step."""
        return f"eta {Seconds(self.eta_seconds)}" if self.step < self.steps else "done"


class Phase:
    """A running phase. Its closing line ends with `detail`, which can be set while it runs.

    `expected_seconds` is the time that it took before, if known.
    """

    def __init__(self, name: str, detail: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.detail = name, detail
        self.expected_seconds: float | None = None
        self._clock, self._began = clock, clock()

    @property
    def elapsed_seconds(self) -> Seconds:
        return Seconds(self._clock() - self._began)

    def running(self) -> str:
        """Return a line while the phase runs, such as `compile ... 30.0 s so far, 45.2 s last time`."""
        before = "" if self.expected_seconds is None else f", {Seconds(self.expected_seconds)} last time"
        text = f"{self.name} ... {self.elapsed_seconds} so far{before}"
        return redact("  ".join(part for part in (text, self.detail) if part))

    def closing(self, failed: bool) -> str:
        """Return the closing line, such as `compile 12.3 s  cache miss  program 3f2a`."""
        time = f"failed after {self.elapsed_seconds}" if failed else str(self.elapsed_seconds)
        return redact("  ".join(part for part in (f"{self.name} {time}", self.detail) if part))


class Reporter:
    """Receives the messages, phases and progress of a command, and ignores them. Subclasses show them.

    The training loop calls a reporter after every step, so its methods must not wait for the terminal. Other threads,
    such as the one that saves checkpoints, call `info` and `warn` too.
    """

    def info(self, text: str) -> None:
        """Show a line."""

    def warn(self, text: str) -> None:
        """Show a line as a warning."""

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        """Show a phase and its time while the block runs, then its closing line."""
        yield Phase(name, detail)

    def progress(self, noun: str, total: int, done: int = 0) -> TaskProgress:
        """Show how many of `total` `noun`s are done while the block runs. `done` of them were done before."""
        return TaskProgress()

    def step(self, view: StepView) -> None:
        """Show the metrics of a training step."""

    def close(self) -> None:
        """Leave the terminal as it was. Nothing may be reported later."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


SILENT = Reporter()


class LineReporter(Reporter):
    """A reporter that prints plain lines.

    It prints the first and the last step, and a step every 10 seconds or 10 %. A phase prints a line every 30 seconds,
    so that a long compilation is not taken for a hang.

    Args:
      stream: receives the lines.
      clock: returns the time in seconds.
      new_end: creates the event that ends the heartbeat of a phase. Tests replace it.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_end: Callable[[], EndSignal] = threading.Event,
    ) -> None:
        self._stream, self._clock, self._new_end = stream, clock, new_end
        self._write_lock = threading.Lock()  # heartbeats print from their own thread
        self._shown_at = -math.inf
        self._shown_tenth = -1

    def info(self, text: str) -> None:
        with self._write_lock:
            self._stream.write(f"{clean(text)}\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        self.info(f"warning: {text}")

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        phase = Phase(name, detail, self._clock)
        self._show_start("  ".join(part for part in (f"{name} ...", detail) if part))
        heartbeat = Heartbeat(lambda: self.info(phase.running()), self._new_end())
        try:
            yield phase
        except BaseException:
            heartbeat.stop()
            self.info(phase.closing(failed=True))
            raise
        heartbeat.stop()
        self.info(phase.closing(failed=False))

    def _show_start(self, text: str) -> None:
        """Show that a phase has started."""
        self.info(text)

    def progress(self, noun: str, total: int, done: int = 0) -> TaskProgress:
        return ProgressBar(noun, total, done, stream=self._stream)

    def step(self, view: StepView) -> None:
        now = self._clock()
        tenth = view.step * STEP_LINES // view.steps
        due = now - self._shown_at >= STEP_SECONDS or tenth > self._shown_tenth
        if not due and view.step < view.steps:
            return
        self._shown_at, self._shown_tenth = now, tenth
        self.info("  ".join((f"step {view.step}/{view.steps}", *view.figures(), view.eta())))

    def close(self) -> None:
        self._stream.flush()


class LogReporter(Reporter):
    """A reporter that prints lines with their time to stdout, for the log of a service."""

    def info(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a full disk must not end the process
            print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, flush=True)

    def warn(self, text: str) -> None:
        self.info(f"warning: {text}")


class EndSignal(Protocol):
    """The part of `threading.Event` that a heartbeat uses."""

    def set(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`. Return False after `timeout` seconds without it."""
        ...


class Heartbeat:
    """Reports a long phase: calls `show` every 30 seconds, until `stop` is called.

    Args:
      show: prints one line. A separate thread calls it.
      end: the event that ends the thread.
    """

    def __init__(self, show: Callable[[], None], end: EndSignal) -> None:
        self._show, self._end = show, end
        # A daemon, so that a process that ends during a phase does not wait for it.
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No line is printed after this call returns."""
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            self._show()
