"""Parallel compiles for several slices, at most one per CPU core."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from forerun import interrupt
from forerun.console import SafeConsole, SafeLive, can_redraw
from forerun.planner.compile.compiler import verdict
from forerun.planner.compile.fit_result import FitResult
from forerun.planner.compile.fork_server import fork_server
from forerun.planner.compile.request import CompileRequest


def answers(
    questions: Sequence[CompileRequest],
    on_phase: Callable[[CompileRequest, str], None] = lambda question, phase: None,
    judge: Callable[..., FitResult | None] = verdict,
) -> list[FitResult]:
    """Compile several requests in parallel.

    Args:
        questions: The requests.
        on_phase: Called from worker threads with a request and its new phase.
        judge: The function that compiles one request, for example `verdict` or `cached_fit_result`.

    Returns:
        The results in the order of the requests, without those for which `judge` returns None.

    Raises:
        Exception: The first failure of `judge`. Compilers that are still running are stopped.
    """
    stop = threading.Event()
    workers = max(1, min(len(questions), os.cpu_count() or 1))
    with fork_server(), interrupt.raising(), ThreadPoolExecutor(max_workers=workers) as pool:
        try:
            futures = [pool.submit(_ask, question, stop, on_phase, judge) for question in questions]
            for future in as_completed(futures):
                future.result()
        except BaseException:  # including Ctrl-C, which may arrive while requests are still being submitted
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [answer for future in futures if (answer := future.result()) is not None]


def _ask(
    question: CompileRequest,
    stop: threading.Event,
    on_phase: Callable[[CompileRequest, str], None],
    judge: Callable[..., FitResult | None],
) -> FitResult | None:
    answer = judge(question, stop, lambda phase: on_phase(question, phase))
    on_phase(question, "impossible" if answer is None else "fits" if answer.fits else "too large")
    return answer


WAITING = "waiting"
WORDS = {"lower": "lowering", "compile": "compiling"}
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass
class _Line:
    """The progress of one compile. Times are of `time.monotonic`."""

    phase: str = WAITING
    began: float = 0.0
    ended: float | None = None

    def seconds(self, now: float) -> float:
        return (self.ended or now) - self.began


class CompileProgress:
    """A context manager that shows progress. The threads that wait for the compilers call `phase`."""

    def __init__(
        self, questions: Sequence[CompileRequest], stream: TextIO | None = None, plain_lines: bool = True
    ) -> None:
        self._stream = stream or sys.stderr
        self._plain_lines = plain_lines
        self._lines = {question.slice.name: _Line() for question in questions}
        self._live: SafeLive | None = None

    def __enter__(self) -> CompileProgress:
        console = SafeConsole(file=self._stream)
        if can_redraw(console):
            self._live = SafeLive(get_renderable=self.screen, console=console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.stop()

    def phase(self, question: CompileRequest, phase: str) -> None:
        """Record a new phase of a compile: `lower`, `compile`, or a final one such as `fits`."""
        line, now = self._lines[question.slice.name], time.monotonic()
        if line.phase == WAITING:
            line.began = now
        if phase not in WORDS:
            line.ended = now
        line.phase = phase
        if not self._live and self._plain_lines:
            after = f" after {line.seconds(now):.1f} s" if line.ended else ""
            # A single write, so that lines of two compilers never mix.
            self._stream.write(f"{question.slice.name}: {WORDS.get(phase, phase)}{after}\n")
            self._stream.flush()

    def screen(self) -> Table:
        """Return a table with one line per slice: name, phase, seconds."""
        now = time.monotonic()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right")
        for name, line in self._lines.items():
            seconds, style = ("", "dim") if line.phase == WAITING else (f"{line.seconds(now):.0f} s", "")
            grid.add_row(_mark(line, now), name, Text(WORDS.get(line.phase, line.phase), style=style), seconds)
        return grid


def _mark(line: _Line, now: float) -> Text:
    if line.phase == WAITING:
        return Text("·", style="dim")
    if line.ended is None:
        return Text(FRAMES[int(now * 8) % len(FRAMES)], style="cyan")
    return Text("✓", style="green") if line.phase == "fits" else Text("✗", style="red")
