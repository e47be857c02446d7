"""Values that a source yields: rows, bad rows with their problems, and pieces that are read independently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.errors import Problem, UserError


class RowPlace(NamedTuple):
    """The place of a row. `word` says what `number` counts: "line", "row" or "document".

    Without a number, the place is the file.
    """

    file: str
    number: int | None = None
    word: str = "line"

    def __str__(self) -> str:
        return self.file if self.number is None else f"{self.file}, {self.word} {self.number}"


class SourceRow(NamedTuple):
    """One document: its values by role, and its place.

    The roles are text | messages | prompt, completion | input_ids[, loss_mask] | chosen, rejected[, prompt]. The
    place counts inside the piece; `Source.resolve` returns the absolute place.
    """

    values: dict[str, Any]
    place: RowPlace


@dataclass(frozen=True)
class BadRow(Problem):
    """A row that cannot be used. With `whole_file`, the rest of a file, or of a piece if the file has several."""

    place: RowPlace
    whole_file: bool = False

    @staticmethod
    def of(problem: Problem, place: RowPlace, *, whole_file: bool = False) -> BadRow:
        """Return the bad row at `place` that has this problem."""
        return BadRow(problem.code, problem.what, problem.why, problem.fix, place, whole_file)

    def error(self) -> UserError:
        """Return the error of this row, with its place."""
        return UserError(self.code, f"{self.place}: {self.what}", why=self.why, fix=self.fix)


class RowError(Exception):
    """An error for a problem of a row or a file. The caller adds the place."""

    def __init__(self, code: str, what: str, *, why: str, fix: str) -> None:
        super().__init__(what)
        self.problem = Problem(code, what, why, fix)

    def at(self, file: str, number: int | None = None, word: str = "line", *, whole_file: bool = False) -> BadRow:
        """Return the problem as a bad row at this place."""
        return BadRow.of(self.problem, RowPlace(file, number, word), whole_file=whole_file)


@dataclass(frozen=True)
class FilePiece:
    """A part of a file that is read independently. `file` is the number of the file in its source.

    The unit of `start` and `stop` depends on the kind of the file:

    - uncompressed JSONL, or text with a separator: bytes. A line or document belongs to the piece that contains its
      first byte.
    - Parquet: row groups. Arrow: record batches. Megatron and datatrove: documents.
    - other files: 0 and the size of the file.

    A `stop` of -1 is the end of the file. If `rows` is not negative, only that many rows at the start are read.
    """

    file: int
    start: int
    stop: int
    rows: int = -1
