"""From `data.path` to documents: the files it names, what they were recognised as, and their texts in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.config.schema import Data
from forerun.data import files, readers
from forerun.data.columns import TextColumn
from forerun.errors import UserError


@dataclass(frozen=True)
class Source:
    """Files of one kind, sorted; `column` is the one that is trained on."""

    files: tuple[files.File, ...]
    column: TextColumn

    @property
    def kind(self) -> str:
        return self.files[0].kind

    @property
    def recognised(self) -> str:
        """For the display: `3 files, jsonl, column text`."""
        many = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"{many}, {self.kind}" + ("" if self.kind == "text" else f", column {self.column.name}")

    def texts(self) -> Iterator[str]:
        """Every document: file after file, row after row, one in memory at a time."""
        for file in self.files:
            yield from readers.texts(file, self.column)


def open_source(data: Data) -> Source:
    """What `data` names; nothing is read before its texts are taken."""
    source = Source(tuple(files.find(data.path)), TextColumn(data.columns))
    if source.kind == "text" and data.columns:
        raise UserError(
            "data.columns: plain text has no columns",
            why=f"{source.files[0].name} is read as text, by its ending",
            fix="leave data.columns out, or give JSONL, CSV, Parquet or Arrow",
        )
    return source
