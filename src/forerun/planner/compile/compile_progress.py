"""Progress display of running compiles: a live line per slice on a terminal, or a printed line per change elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from forerun.console import SafeConsole, SafeLive, can_redraw
from forerun.planner.compile.request import CompileRequest

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
