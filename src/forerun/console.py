"""rich's console and live display with filtered text, so that only rich itself writes control sequences."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from forerun.interrupt import cleanup
from forerun.notebook_kernel import below_notebook
from forerun.safe_text import printable, raw_stream, safe_stream

SHOW_CURSOR = b"\x1b[?25h"


def can_redraw(console: Console) -> bool:
    """Return whether the console is a terminal that can move its cursor, as live displays need it.

    The kernel of a notebook sets FORCE_COLOR, which makes every console of rich a terminal.
    """
    return console.is_terminal and not console.is_dumb_terminal and not below_notebook()


class SafeConsole(Console):
    """A console that shows control characters in texts as escapes, and does not interpret [markup] in them."""

    def __init__(self, *, file: TextIO | None = None, **settings: Any) -> None:
        # In a notebook rich would show everything as HTML, even text for a file. The API has its own HTML.
        settings = {"force_jupyter": False, "highlight": False, "markup": False, "emoji": False, **settings}
        super().__init__(file=raw_stream(file or sys.stdout), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class SafeLive(Live):
    """A live display. Text that is printed meanwhile is filtered, because rich interprets escape sequences in it."""

    _cursor: ExitStack | None = None

    def start(self, refresh: bool = False) -> None:
        before = sys.stdout, sys.stderr
        self._cursor = ExitStack()
        self._cursor.enter_context(cleanup(self._show_cursor))
        super().start(refresh)
        if sys.stdout is not before[0]:
            sys.stdout = safe_stream(sys.stdout)
        if sys.stderr is not before[1]:
            sys.stderr = safe_stream(sys.stderr, messages=True)

    def stop(self) -> None:
        super().stop()
        if self._cursor is not None:
            self._cursor.close()

    def _show_cursor(self) -> None:
        """Show the cursor again when Ctrl-C ends the process. This does not use rich, whose locks may be held."""
        with suppress(OSError, ValueError):
            if self.console.is_terminal:
                os.write(self.console.file.fileno(), SHOW_CURSOR)
