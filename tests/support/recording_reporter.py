"""Reporters for tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forerun.progress import TaskProgress
from forerun.reporter import Reporter


class RecordingReporter(Reporter):
    """Adds all texts to `lines`, those of warnings also to `warnings`, and progress as (done, total) to `updates`."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines: list[str] = [] if lines is None else lines
        self.warnings: list[str] = []
        self.updates: list[tuple[int, int]] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)
        self.warnings.append(text)

    def progress(self, noun: str, total: int, done: int = 0) -> TaskProgress:
        return _RecordedProgress(self.updates, total)


class _RecordedProgress(TaskProgress):
    def __init__(self, updates: list[tuple[int, int]], total: int) -> None:
        self._updates, self._total = updates, total

    def update(self, done: int, detail: str = "") -> None:
        self._updates.append((done, self._total))


class CallingReporter(Reporter):
    """Passes all texts to a function."""

    def __init__(self, function: Callable[[str], None]) -> None:
        self._function = function

    def info(self, text: str) -> None:
        self._function(text)

    def warn(self, text: str) -> None:
        self._function(text)


class FailingReporter(Reporter):
    """Fails the test if anything is reported."""

    def info(self, text: str) -> None:
        pytest.fail(text)

    def warn(self, text: str) -> None:
        pytest.fail(text)
