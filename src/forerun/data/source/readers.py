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


def rows(file: File, columns: Columns, piece: Piece) -> Iterator[Row | Bad]:
    """The rows of one piece, numbered from 1 inside it. A bad row does not end them, unless it is the whole file."""
    if file.kind == "text":
        return plain.rows(file)
    if file.kind == "jsonl":
        return jsonl.rows(file, columns, piece)
    if file.kind in _TABLES:
        return tables.rows(file, columns, piece)
    return separated.rows(file, columns)


def pieces(file: File, at: int, piece_bytes: int) -> list[Piece]:
    """`file`, which is number `at` of its source, as pieces of about `piece_bytes`."""
    if file.kind == "jsonl":
        return jsonl.pieces(file, at, piece_bytes)
    if file.kind in _TABLES:
        return tables.pieces(file, at, piece_bytes)
    return [Piece(at, 0, file.size_bytes())]


def before(file: File, piece: Piece) -> int:
    """How many lines or rows stand before the piece; this reads the file up to it."""
    if file.kind == "jsonl":
        return jsonl.before(file, piece)
    return tables.before(file, piece) if file.kind in _TABLES else 0
