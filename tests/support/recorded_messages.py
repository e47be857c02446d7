"""A reporter that keeps its messages."""

from __future__ import annotations

from forerun.reporter import Reporter


class RecordedMessages(Reporter):
    """Keeps the texts of `info` and `warn`, in their order; those of `warn` also in `warnings`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.warnings: list[str] = []

    def info(self, text: str) -> None:
        self.texts.append(text)

    def warn(self, text: str) -> None:
        self.texts.append(text)
        self.warnings.append(text)
