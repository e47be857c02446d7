"""Sources of rows: the files that `data.path` names, the form of their rows, and the rows of each piece."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from forerun.data.source import files, identity, jsonl, plain, separated, tables, token_files
from forerun.data.source.columns import Columns
from forerun.data.source.files import File
from forerun.data.source.kinds import TABLE_KINDS, TOKEN_KINDS
from forerun.data.source.lines import byte_pieces
from forerun.data.source.rows import BadRow, FilePiece, RowPlace, SourceRow
from forerun.errors import UserError
from forerun.hub.repository import RangeFiles

if TYPE_CHECKING:
    from forerun.config.schema import Data, Part


_THREADS = 16


@dataclass(frozen=True)
class Source:
    """Files of one kind, sorted by path, whose rows all have one form."""

    files: tuple[files.File, ...]
    form: str
    columns: Mapping[str, Any]  # role to column or template, as set in the job
    separator: str | None = None  # between the documents of a text
    names: tuple[str, ...] = ()  # columns of the first row, for the display
    style: str = ""  # variant of the form, for the display
    limit: int | None = None  # number of rows to read

    @property
    def kind(self) -> str:
        return self.files[0].kind

    @property
    def recognised(self) -> str:
        """A description for the display, such as `3 files, jsonl, chat, column messages`."""
        many = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        split = "" if self.separator is None else f", split at {self.separator!r}"
        word = "document" if self.kind in ("text", *TOKEN_KINDS) else "row"
        first = "" if self.limit is None else f", the first {self.limit:,} {word}s"
        if self.kind in TOKEN_KINDS:
            return f"{many}, {self.kind}, already tokenized ({self.style}){first}"
        return f"{many}, {self.kind}" + ("" if self.kind == "text" else f", {self._roles.shown}") + split + first

    @property
    def is_read_by_ranges(self) -> bool:
        """Whether the files are on the hub and are not downloaded."""
        return isinstance(self.files[0].store, RangeFiles)

    @property
    def unused(self) -> list[str]:
        """Columns of the files that are not read."""
        return self._roles.unused

    @property
    def unused_prompts(self) -> list[str]:
        """Unused columns with the name of a prompt, which are probably a mistake."""
        return self._roles.unused_prompts

    @property
    def size_bytes(self) -> int:
        """The stored size of all files in bytes. A file whose size the store does not report counts as 0."""
        return sum(max(file.size_bytes(), 0) for file in self.files)

    def pieces(self, piece_bytes: int) -> list[FilePiece]:
        """Return all files as pieces of about `piece_bytes`, in order. Together they contain every row once.

        With a limit, this reads the first rows to find the last piece. Bad rows count, so that the result does not
        depend on the number of bad rows that the job allows.
        """
        if self.limit is None and self.files[0].store is not None:  # the requests of many files at the same time
            with ThreadPoolExecutor(min(_THREADS, len(self.files))) as threads:
                found_all = threads.map(lambda at: self._pieces(at, piece_bytes), range(len(self.files)))
                return [piece for pieces in found_all for piece in pieces]
        every = (piece for at in range(len(self.files)) for piece in self._pieces(at, piece_bytes))
        if self.limit is None:
            return list(every)
        found: list[FilePiece] = []
        left = self.limit
        for piece in every:
            rows = count_rows(self._rows(piece), left)
            found.append(replace(piece, rows=rows) if rows == left else piece)
            left -= rows
            if not left:
                break
        return found

    def rows(self, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
        """Yield the rows and the bad rows of one piece. Their places count inside the piece."""
        left = piece.rows
        for row in self._rows(piece):
            if left == 0:
                return
            left -= is_row(row)
            yield row

    def first_rows(self, count: int) -> list[SourceRow]:
        """Return the good rows among the first `count` rows of the first file."""
        piece = file_pieces(self.files[0], 0, 1 << 62, self.separator)[0]
        return [row for row in islice(self._rows(piece), count) if isinstance(row, SourceRow)]

    def resolve(self, piece: FilePiece, place: RowPlace) -> RowPlace:
        """Return a place inside `piece` as a place counted from the start of the file.

        This may read the file up to the piece.
        """
        if place.number is None or piece.start == 0:
            return place
        return place._replace(number=place.number + rows_before(self.files[piece.file], piece, self.separator))

    def identities(self) -> list[str]:
        """Return for each file a digest of its content, or the checksum that its store reports."""
        return identity.identities(self.files)

    def to_json(self) -> dict[str, Any]:
        """Return what another process needs to open the same source, in types of JSON."""
        return {
            "files": [[file.address, file.kind, file.packed] for file in self.files],
            "form": self.form,
            "columns": dict(self.columns),
            "separator": self.separator,
            "names": list(self.names),
            "style": self.style,
            "limit": self.limit,
        }

    @classmethod
    def from_json(cls, made: Mapping[str, Any] | str) -> Source:
        """Return the source of a `to_json` result, which may be given as JSON text."""
        given = json.loads(made) if isinstance(made, str) else made
        found = tuple(files.at_address(*file) for file in given["files"])
        more = {"names": tuple(given.get("names", ())), "style": given.get("style", ""), "limit": given.get("limit")}
        return cls(found, given["form"], dict(given["columns"]), given.get("separator"), **more)

    def _pieces(self, at: int, piece_bytes: int) -> list[FilePiece]:
        return file_pieces(self.files[at], at, piece_bytes, self.separator)

    def _rows(self, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
        return file_rows(self.files[piece.file], self._roles, piece, self.separator)

    @property
    def _roles(self) -> Columns:
        return Columns(self.form, self.columns, self.names, self.style)


def open_source(part: Part | Data) -> Source:
    """Find the files of `part` and recognise the form of their rows.

    Args:
        part: The `data` section of a job, or one part of its mixture.

    Returns:
        The source. Its form is that of the first file whose form is recognised.

    Raises:
        UserError: There are no files or files of several kinds, `columns` or `separator` does not apply to them,
            or no file has a known form. In the last case the error is the problem of the first file.
    """
    enough = None if part.limit is None else _FirstRows(part, part.limit)
    found = tuple(files.find(part.path or "", enough))
    if found[0].kind in ("text", *TOKEN_KINDS) and part.columns:
        raise UserError(
            "E-DATA-053",
            f"data.columns: {'plain text' if found[0].kind == 'text' else 'a file of token ids'} has no columns",
            why=f"{found[0].name} is read as {found[0].kind}, because of its ending",
            fix="remove data.columns, or use JSONL, CSV, Parquet or Arrow",
        )
    first: BadRow | None = None
    for file in found:
        columns = recognise_file(file, part.columns)
        if isinstance(columns, Columns):
            _require_text(columns.form, part.separator, file)
            given = dict(columns.given)
            return Source(found, columns.form, given, part.separator, columns.names, columns.style, part.limit)
        first = first or columns
    assert first is not None
    raise first.error()


class _FirstRows:
    """A function of files, which returns whether they contain the rows of `data.limit`. It reads each file once."""

    def __init__(self, part: Part | Data, limit: int) -> None:
        self._part, self._limit = part, limit
        self._counts: dict[str, int] = {}

    def __call__(self, found: Sequence[files.File]) -> bool:
        for file in found:
            if file.address not in self._counts:
                left = self._limit - sum(self._counts.values())
                self._counts[file.address] = self._count(file, max(left, 1))
        return sum(self._counts[file.address] for file in found) >= self._limit

    def _count(self, file: files.File, most: int) -> int:
        """Return the number of rows of a file, at most `most`. A file whose form is not known has none."""
        columns = recognise_file(file, self._part.columns)
        if isinstance(columns, BadRow):
            return 0
        pieces = file_pieces(file, 0, 1 << 62, self._part.separator)
        return sum(count_rows(file_rows(file, columns, piece, self._part.separator), most) for piece in pieces)


def _require_text(form: str, separator: str | None, file: files.File) -> None:
    if separator is not None and form != "text":
        raise UserError(
            "E-DATA-054",
            "data.separator divides texts into documents",
            why=f"{file.name} holds {form}, and each row is already one document",
            fix="remove data.separator; in a mixture, set it only for parts of plain text",
        )


# ---- Dispatch to the reader for the kind of a file ----


def recognise_file(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the rows of `file`, or a BadRow if it has none."""
    if file.kind == "text":
        return Columns("text", {})
    if file.kind == "jsonl":
        return jsonl.recognise(file, given)
    if file.kind in TABLE_KINDS:
        return tables.recognise(file, given)
    if file.kind in TOKEN_KINDS:
        return token_files.recognise(file, given)
    return separated.recognise(file, given)


def file_rows(
    file: File, columns: Columns, piece: FilePiece, separator: str | None = None
) -> Iterator[SourceRow | BadRow]:
    """Return the rows of one piece, numbered from 1 inside it.

    Iteration continues after a bad row, unless the bad row is the complete file. `separator` divides the texts of
    files and of rows into token_files.
    """
    if file.kind == "text":
        return plain.rows(file, separator, piece)
    found = _reader_rows(file, columns, piece)
    return found if separator is None else _split_rows(found, separator)


def _reader_rows(file: File, columns: Columns, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    if file.kind == "jsonl":
        return jsonl.rows(file, columns, piece)
    if file.kind in TABLE_KINDS:
        return tables.rows(file, columns, piece)
    if file.kind in TOKEN_KINDS:
        return token_files.rows(file, piece)
    return separated.rows(file, columns)


def _split_rows(rows: Iterator[SourceRow | BadRow], separator: str) -> Iterator[SourceRow | BadRow]:
    """Yield the documents in the texts of the rows. All documents of a row have the place of the row."""
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        found = plain.split_text(row.values["text"], separator)
        yield from (SourceRow({"text": text}, row.place) for text in found)
        if not found:
            yield BadRow(
                "E-DATA-111", "holds no text", why="it has only separators", fix="delete this row", place=row.place
            )


def is_row(row: SourceRow | BadRow) -> bool:
    """Return whether `row` is a row, good or bad, and not the rest of a damaged file."""
    return not (isinstance(row, BadRow) and row.whole_file)


def count_rows(rows: Iterator[SourceRow | BadRow], most: int) -> int:
    """Return the number of rows, at most `most`. Rows after these are not read."""
    return sum(1 for _ in islice(filter(is_row, rows), most))


def file_pieces(file: File, at: int, piece_bytes: int, separator: str | None = None) -> list[FilePiece]:
    """Return `file` as pieces of about `piece_bytes`. `at` is its number in the source."""
    if file.kind == "text":
        return plain.pieces(file, at, piece_bytes, separator)
    if file.kind == "jsonl":
        return byte_pieces(file, at, piece_bytes)
    if file.kind in TABLE_KINDS:
        return tables.pieces(file, at, piece_bytes)
    if file.kind in TOKEN_KINDS:
        return token_files.pieces(file, at, piece_bytes)
    return [FilePiece(at, 0, file.size_bytes())]


def rows_before(file: File, piece: FilePiece, separator: str | None = None) -> int:
    """Return the number of lines, rows or documents before the piece. This may read the file up to the piece."""
    if file.kind == "text":
        return plain.before(file, piece, separator)
    if file.kind == "jsonl":
        return jsonl.before(file, piece)
    if file.kind in TOKEN_KINDS:
        return piece.start
    return tables.before(file, piece) if file.kind in TABLE_KINDS else 0
