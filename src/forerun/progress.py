"""Progress of a task: a bar with the remaining time on a terminal, plain lines elsewhere.

Functions get it from `Reporter.progress`. rich is imported only when a bar is drawn.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TextIO

from forerun.safe_text import safe_stream
from forerun.units import Seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY_SECONDS = 10.0
BAR_WIDTH = 30


class TaskSpeed:
    """The speed of a task and its remaining time. Work that was done before the start does not count."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done = total, done
        self._before, self._began = done, time.monotonic()

    @property
    def spent_seconds(self) -> Seconds:
        """The time since the start."""
        return Seconds(time.monotonic() - self._began)

    def eta_seconds(self) -> Seconds | None:
        """Return the remaining time, or None before any work is done."""
        new = self.done - self._before
        return Seconds(self.spent_seconds * (self.total - self.done) / new) if new > 0 else None


class TaskProgress:
    """The progress of a task, from `Reporter.progress`. This class ignores it."""

    def update(self, done: int, detail: str = "") -> None:
        """Show that `done` are done, with a detail such as a speed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class ProgressBar(TaskProgress):
    """A bar for `noun`s, such as rows, on `stream`. `done` of `total` were done before.

    Without a terminal it writes a line every `every_seconds` and one at the end. `live=False` does so on a terminal
    too: use it while the task prints to the same terminal.
    """

    def __init__(
        self,
        noun: str,
        total: int,
        done: int = 0,
        *,
        stream: TextIO,
        every_seconds: float = EVERY_SECONDS,
        live: bool = True,
    ) -> None:
        self._noun, self._every_seconds, self._live = noun, every_seconds, live
        self._stream = safe_stream(stream, messages=True)
        self._pace, self._shown = TaskSpeed(total, done), time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._bar = self._start_bar() if self._live else None
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def update(self, done: int, detail: str = "") -> None:
        pace, now = self._pace, time.monotonic()
        pace.done = done
        is_complete = done >= pace.total
        left = pace.spent_seconds if is_complete else f"eta {pace.eta_seconds()}"
        text = ", ".join(filter(None, (f"{done}/{pace.total} {self._noun}", detail, str(left))))
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=done, description=text)
            if is_complete:
                self._open.close()
                self._bar = None
        if self._bar is None and (is_complete or now - self._shown >= self._every_seconds):
            self._shown = now
            print(text, file=self._stream, flush=True)

    def _start_bar(self) -> tuple[Progress, TaskID] | None:
        """Return a bar that rich draws, or None without a terminal."""
        if not self._stream.isatty():
            return None
        from rich.progress import BarColumn, Progress, TextColumn

        from forerun.console import SafeConsole, SafeLive, can_redraw

        console = SafeConsole(file=self._stream)
        if not can_redraw(console):
            return None
        bar = Progress(BarColumn(BAR_WIDTH), TextColumn("{task.description}", markup=False), console=console)
        # By default, rich redirects stdout to the console of the bar, which is stderr here.
        bar.live = SafeLive(get_renderable=bar.get_renderable, console=console, transient=True, redirect_stdout=False)
        task = bar.add_task("", total=self._pace.total, completed=self._pace.done)
        self._open.enter_context(bar)
        return bar, task
