"""Choose the display of a run: live on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from forerun.notebook_kernel import below_notebook, in_notebook
from forerun.reporter import LineReporter, Reporter, StepView
from forerun.safe_text import clean

UPDATE_SECONDS = 0.5  # a message to the browser for every step would be slower than a small model


def make_display(stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """Return a live display for a terminal that can move its cursor, a bar for a notebook, plain lines otherwise."""
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not below_notebook():
        from forerun.track.display.terminal import TerminalDisplay

        return TerminalDisplay(stream, clock=clock)
    if stream is sys.stdout and in_notebook():
        return NotebookDisplay(stream, clock=clock)
    return LineReporter(stream, clock=clock)


class NotebookDisplay(LineReporter):
    """Prints messages and finished phases as lines. One element shows the current phase, and then the newest step."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float]) -> None:
        super().__init__(stream, clock=clock)
        self._status: Any = None  # IPython's handle of the HTML that is updated
        self._updated_at = float("-inf")
        self._newest: StepView | None = None

    def step(self, view: StepView) -> None:
        """Keep the newest step, and show it if the bar is older than `UPDATE_SECONDS`."""
        self._newest = view
        if self._clock() - self._updated_at >= UPDATE_SECONDS or view.step == view.steps:
            self._show(view)

    def close(self) -> None:
        """Show the newest step, which may have come too soon after the one before, or nothing without steps."""
        if self._newest is not None:
            self._show(self._newest)
            self._newest = None
        elif self._status is not None and self._updated_at == float("-inf"):
            self._update("")
        super().close()

    def _show_start(self, text: str) -> None:
        self._update(f"<div>{html.escape(clean(text))}</div>")

    def _show(self, view: StepView) -> None:
        self._updated_at = self._clock()
        self._update(bar_html(view))

    def _update(self, content: str) -> None:
        from IPython.display import HTML, display

        if self._status is None:
            self._status = display(HTML(content), display_id=True)
        else:
            self._status.update(HTML(content))


def bar_html(view: StepView) -> str:
    """Return a progress bar with the figures of a step."""
    figures = html.escape("  ".join((*view.figures(), view.eta())))
    return (
        f'<div><progress value="{view.step}" max="{view.steps}" style="width: 20em"></progress> '
        f"step {view.step}/{view.steps}&ensp;{figures}</div>"
    )
