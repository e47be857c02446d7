"""Reporters for tests."""

from __future__ import annotations

import pytest

from forerun.reporter import Reporter


class RecordingReporter(Reporter):
    """Adds all texts to `lines`, and those of warnings also to `warnings`."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines: list[str] = [] if lines is None else lines
        self.warnings: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    def warn(self, text: str) -> None:
        self.lines.append(text)
        self.warnings.append(text)


class FailingReporter(Reporter):
    """Fails the test if anything is reported."""

    def info(self, text: str) -> None:
        pytest.fail(text)

    def warn(self, text: str) -> None:
        pytest.fail(text)
