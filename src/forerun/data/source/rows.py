"""What a source gives: rows, bad rows with what is wrong with them, and the pieces that are read independently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.errors import UserError


class Place(NamedTuple):
    """Where a row stands; `word` is "line" or "row", and without a number the place is the file."""

    file: str
    number: int | None = None
    word: str = "line"

    def __str__(self) -> str:
        return self.file if self.number is None else f"{self.file}, {self.word} {self.number}"


class Row(NamedTuple):
    """One document by role: text | messages | prompt, completion | input_ids[, loss_mask] | chosen, rejected[, prompt].

    The place counts inside the piece; `Source.resolve` gives the absolute one.
    """

    values: dict[str, Any]
    place: Place


@dataclass(frozen=True)
class Bad:
    """A row that cannot be used, or with `whole_file` the rest of a file (of a piece, if it has several)."""

    place: Place
    what: str
    why: str
    fix: str
    whole_file: bool = False

    def error(self) -> UserError:
        return UserError(f"{self.place}: {self.what}", why=self.why, fix=self.fix)


@dataclass(frozen=True)
class Piece:
    """A part of file number `file` that is read on its own.

    `start` and `stop` are bytes of a plain JSONL file (a line belongs to the piece its first byte is in), row groups
    of Parquet, record batches of an Arrow file; otherwise 0 and the file's size. A `stop` of -1 is the end.
    """

    file: int
    start: int
    stop: int
