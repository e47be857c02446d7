"""A display that shows nothing, for functions that return their result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from forerun.track.display.display import Phase, StepView


class QuietDisplay:
    """Implements the protocol of displays without output."""

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[Phase]:
        yield Phase(name, detail, time.monotonic)

    def step(self, view: StepView) -> None: ...
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
