"""One door to the readers of each kind: what a file holds, its pieces, its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forerun.data.source import jsonl, plain, separated, tables
from forerun.data.source.columns import Columns
from forerun.data.source.files import File
from forerun.data.source.rows import Bad, Piece, Row

_TABLES = ("parquet", "arrow")


def recognise(file: File, given: Mapping[str, str]) -> Columns | Bad:
    """The form of the rows of `file`, or why there is none."""
    if file.kind == "text":
        return Columns("text", {})
    if file.kind == "jsonl":
        return jsonl.recognise(file, given)
    if file.kind in _TABLES:
        return tables.recognise(file, given)
    return separated.recognise(file, given)


def rows(file: File, columns: Columns, piece: Piece, separator: str | None = None) -> Iterator[Row | Bad]:
    """Return the rows of one piece, numbered from 1 inside it.

    A bad row does not end them, unless it is the whole file. `separator` divides the texts of files and of rows into
    documents.
    """
    if file.kind == "text":
        return plain.rows(file, separator, piece)
    found = _rows(file, columns, piece)
    return found if separator is None else _divided(found, separator)


def _rows(file: File, columns: Columns, piece: Piece) -> Iterator[Row | Bad]:
    if file.kind == "jsonl":
        return jsonl.rows(file, columns, piece)
    if file.kind in _TABLES:
        return tables.rows(file, columns, piece)
    return separated.rows(file, columns)


def _divided(rows: Iterator[Row | Bad], separator: str) -> Iterator[Row | Bad]:
    for row in rows:
        if isinstance(row, Bad):
            yield row
            continue
        found = plain.split_text(row.values["text"], separator)
        yield from (Row({"text": text}, row.place) for text in found)
        if not found:
            yield Bad(row.place, "holds no text", "it has nothing but separators", "delete this row")


def pieces(file: File, at: int, piece_bytes: int, separator: str | None = None) -> list[Piece]:
    """`file`, which is number `at` of its source, as pieces of about `piece_bytes`."""
    if file.kind == "text":
        return plain.pieces(file, at, piece_bytes, separator)
    if file.kind == "jsonl":
        return jsonl.pieces(file, at, piece_bytes)
    if file.kind in _TABLES:
        return tables.pieces(file, at, piece_bytes)
    return [Piece(at, 0, file.size_bytes())]


def before(file: File, piece: Piece, separator: str | None = None) -> int:
    """Return how many lines, rows or documents are before the piece; this reads the file up to it."""
    if file.kind == "text":
        return plain.before(file, piece, separator)
    if file.kind == "jsonl":
        return jsonl.before(file, piece)
    return tables.before(file, piece) if file.kind in _TABLES else 0
