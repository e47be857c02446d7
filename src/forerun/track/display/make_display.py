"""Choose the display of a run: live on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from forerun.notebook_kernel import below_notebook, in_notebook
from forerun.reporter import LineReporter, Reporter


def make_display(stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> Reporter:
    """Return a live display for a terminal that can move its cursor, a bar for a notebook, plain lines otherwise."""
    if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not below_notebook():
        from forerun.track.display.terminal import TerminalDisplay

        return TerminalDisplay(stream, clock=clock)
    if stream is sys.stdout and in_notebook():
        from forerun.track.display.notebook import NotebookDisplay

        return NotebookDisplay(stream, clock=clock)
    return LineReporter(stream, clock=clock)
