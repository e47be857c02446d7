"""The display for pipes, files and CI. It prints the first and the last step, and a line every 10 seconds or 10 %."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from forerun.safe_text import clean
from forerun.track.display.display import Phase, StepView

EVERY_SECONDS = 10.0
LINES_PER_RUN = 10


class PlainDisplay:
    """A display that prints plain lines."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._shown_at = -math.inf
        self._shown_tenth = -1

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        phase = Phase(name, detail, self._clock)
        self.say("  ".join(part for part in (f"{name} ...", detail) if part))
        try:
            yield phase
        except BaseException:
            self.say(phase.closing(failed=True))
            raise
        self.say(phase.closing(failed=False))

    def step(self, view: StepView) -> None:
        now = self._clock()
        tenth = view.step * LINES_PER_RUN // view.steps
        due = now - self._shown_at >= EVERY_SECONDS or tenth > self._shown_tenth
        if not due and view.step < view.steps:
            return
        self._shown_at, self._shown_tenth = now, tenth
        self.say("  ".join((f"step {view.step}/{view.steps}", *view.figures(), view.eta())))

    def say(self, text: str) -> None:
        self._stream.write(f"{clean(text)}\n")
        self._stream.flush()

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def close(self) -> None:
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
