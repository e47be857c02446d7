"""The display of a run in a Jupyter notebook: lines of text, and a status that is updated in place."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, TextIO

from forerun.reporter import LineReporter, StepView
from forerun.safe_text import clean

UPDATE_SECONDS = 0.5  # a message to the browser for every step would be slower than a small model


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
