"""rich's console and live display with filtered text: control sequences come from rich alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from forerun.safe_text import printable, raw_stream, safe_stream


class SafeConsole(Console):
    """A console that shows control characters in texts as escapes, and does not interpret [markup] in them."""

    def __init__(self, *, file: TextIO | None = None, **settings: Any) -> None:
        super().__init__(file=raw_stream(file or sys.stdout), highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class SafeLive(Live):
    """A live display. rich interprets the escapes of what is printed meanwhile, so that is filtered first."""

    def start(self, refresh: bool = False) -> None:
        before = sys.stdout, sys.stderr
        super().start(refresh)
        if sys.stdout is not before[0]:
            sys.stdout = safe_stream(sys.stdout)
        if sys.stderr is not before[1]:
            sys.stderr = safe_stream(sys.stderr, messages=True)
