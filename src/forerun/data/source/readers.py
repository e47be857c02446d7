"""Dispatch to the reader for the kind of a file, which recognises its form, lists its pieces and reads its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from forerun.data.source import jsonl, plain, separated, tables
from forerun.data.source.columns import Columns
from forerun.data.source.files import File
from forerun.data.source.kinds import TABLE_KINDS, TOKEN_KINDS
from forerun.data.source.rows import BadRow, FilePiece, SourceRow
from forerun.data.source.tokenized import documents


def recognise(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the rows of `file`, or a BadRow if it has none."""
    if file.kind == "text":
        return Columns("text", {})
    if file.kind == "jsonl":
        return jsonl.recognise(file, given)
    if file.kind in TABLE_KINDS:
        return tables.recognise(file, given)
    if file.kind in TOKEN_KINDS:
        return documents.recognise(file, given)
    return separated.recognise(file, given)


def rows(file: File, columns: Columns, piece: FilePiece, separator: str | None = None) -> Iterator[SourceRow | BadRow]:
    """Return the rows of one piece, numbered from 1 inside it.

    Iteration continues after a bad row, unless the bad row is the complete file. `separator` divides the texts of
    files and of rows into documents.
    """
    if file.kind == "text":
        return plain.rows(file, separator, piece)
    found = _rows(file, columns, piece)
    return found if separator is None else _split_rows(found, separator)


def _rows(file: File, columns: Columns, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    if file.kind == "jsonl":
        return jsonl.rows(file, columns, piece)
    if file.kind in TABLE_KINDS:
        return tables.rows(file, columns, piece)
    if file.kind in TOKEN_KINDS:
        return documents.rows(file, piece)
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


def count(rows: Iterator[SourceRow | BadRow], most: int) -> int:
    """Return the number of rows, at most `most`. Rows after these are not read."""
    return sum(1 for _ in islice(filter(is_row, rows), most))


def pieces(file: File, at: int, piece_bytes: int, separator: str | None = None) -> list[FilePiece]:
    """Return `file` as pieces of about `piece_bytes`. `at` is its number in the source."""
    if file.kind == "text":
        return plain.pieces(file, at, piece_bytes, separator)
    if file.kind == "jsonl":
        return jsonl.pieces(file, at, piece_bytes)
    if file.kind in TABLE_KINDS:
        return tables.pieces(file, at, piece_bytes)
    if file.kind in TOKEN_KINDS:
        return documents.pieces(file, at, piece_bytes)
    return [FilePiece(at, 0, file.size_bytes())]


def before(file: File, piece: FilePiece, separator: str | None = None) -> int:
    """Return the number of lines, rows or documents before the piece. This may read the file up to the piece."""
    if file.kind == "text":
        return plain.before(file, piece, separator)
    if file.kind == "jsonl":
        return jsonl.before(file, piece)
    if file.kind in TOKEN_KINDS:
        return piece.start
    return tables.before(file, piece) if file.kind in TABLE_KINDS else 0
