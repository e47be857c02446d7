"""The lines of `forerun run` while it controls a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from forerun.cloud.control.actions import Action
    from forerun.cloud.control.run_view import ControlView
    from forerun.cloud.record.entries import LeaseEntry

LINE_SECONDS = 60.0  # between two lines about the same state, without a terminal


class ControlLines:
    """Prints one line for each event. On a terminal, the last line shows the present state."""

    def __init__(self, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._live = stream.isatty()
        self._state, self._printed_at = "", float("-inf")
        self._last = self._program = ""

    def __enter__(self) -> ControlLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def show(self, view: ControlView, action: Action) -> None:
        from forerun.cloud.control.actions import DeliverJob
        from forerun.cloud.control.run_report import event_text

        event = event_text(action)
        if event is not None and not (isinstance(action, DeliverJob) and event == self._last):
            self._line(event)
            self._last = event
        if event is None:
            self._show_state(view)

    def standby(self, view: ControlView, lease: LeaseEntry) -> None:
        text = f"{lease.holder} controls the run; this process takes over if it ends"
        if text != self._last:
            self._line(text)
            self._last = text
        self._show_state(view)

    def trouble(self, message: str) -> None:
        text = message.splitlines()[0] if message else "no answer"
        if text != self._last:
            self._line(text)
            self._last = text

    def _show_state(self, view: ControlView) -> None:
        from forerun.cloud.control.run_report import phase_text, program_text, state_text

        program = program_text(view)
        if program is not None and program != self._program:
            self._program = program
            self._line(program)
        text = state_text(view)
        if self._live:
            self._clear()
            print(text[:119], end="", file=self._stream, flush=True)
            return
        current = view.current
        state = "" if current is None else f"{current.entry.number} {current.ready is None} {phase_text(view)}"
        if state != self._state or self._clock() - self._printed_at > LINE_SECONDS:
            self._state, self._printed_at = state, self._clock()
            self._line(text)

    def _line(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
