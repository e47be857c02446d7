"""Reader of JSON lines: a complete file, or a byte range of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from forerun.data.source.columns import Columns, recognised, shape_of
from forerun.data.source.files import File
from forerun.data.source.lines import CorruptFile, damaged, lines, newlines, no_rows
from forerun.data.source.rows import BadRow, FilePiece, RowError, RowPlace, SourceRow
from forerun.data.source.values import MAX_DEPTH, checker, nested_too_deeply, too_deep, too_large

_PROBE_LINES = 1000
_NESTED = frozenset((list, dict))
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # the scanner inside json.loads, for speed


def recognise(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the first line that has one, among the first 1000 lines.

    If no line has a form, return the problem of the first bad line, or of the file.
    """
    first: BadRow | None = None
    with file.open() as stream:
        numbered = enumerate(islice(chain.from_iterable(lines(file, stream)), _PROBE_LINES), 1)
        while True:
            number = 0
            try:
                number, line = next(numbered, (0, b""))
                if not number:
                    return first or no_rows(file).at(file.name, whole_file=True)
                row = _parse_line(file, line)[0]
                if row is not None:
                    return recognised(row, given, {name: shape_of(value) for name, value in row.items()})
            except CorruptFile as error:
                return first or damaged(error).at(file.name, whole_file=True)
            except RowError as row_error:
                first = first or row_error.at(file.name, number)


def rows(file: File, columns: Columns, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    """Yield the rows of the lines that begin in `piece`, numbered from 1, and a BadRow for each bad line.

    Blank lines are skipped. A damaged or empty file also gives a BadRow.
    """
    check, name = checker(columns), file.name
    start, stop = (0, -1) if file.packed else (piece.start, piece.stop)
    number, found = 0, False
    with file.open() as stream:
        try:
            for line in chain.from_iterable(lines(file, stream, start, stop)):
                number += 1
                try:
                    row, text = _parse_line(file, line)
                    if row is None:
                        continue
                    yield SourceRow(check(row, text), RowPlace(name, number))
                except RowError as row_error:
                    yield row_error.at(name, number)
                found = True
        except CorruptFile as error:
            after = "after this line" if number else ""
            yield damaged(error, after).at(name, number if number or start else None, whole_file=True)
            return
    if not found and start == 0 and (stop < 0 or stop >= file.size_bytes()):
        yield no_rows(file).at(name, whole_file=True)


def before(file: File, piece: FilePiece) -> int:
    """Return the number of lines that begin before the piece. This reads the file up to the piece."""
    return 0 if file.packed or piece.start == 0 else 1 + newlines(file, piece.start - 1)


def _parse_line(file: File, line: bytes | int) -> tuple[dict[str, Any] | None, str]:
    """Return the object in `line` (None for a blank line), and the line as text.

    An integer is the size of a line that is too long. Raise RowError for it and for lines that are not objects.
    """
    if isinstance(line, int):
        raise too_large(line)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            "E-DATA-040",
            "not UTF-8",
            why=f"byte {error.start} of the line is 0x{line[error.start]:02x}: {error.reason}",
            fix="fix or delete this line; if the file is Latin-1: iconv -f latin1 -t utf-8",
        ) from error
    try:
        row, end = _scan(text, 0)
        if end != len(text) and text[end:].strip(" \t\r"):
            raise StopIteration
    except (StopIteration, ValueError, RecursionError):
        if not text.strip():
            return None, text
        row = _parse_slowly(file, text)
    if type(row) is not dict:
        raise RowError(
            "E-DATA-041",
            "not an object",
            why=f'the line is a {type(row).__name__}; each line must be one object such as {{"text": "..."}}',
            fix=f"fix the line; if the file is one list: {_as_lines(file)}",
        )
    if not _NESTED.isdisjoint(map(type, row.values())) and _many_brackets(line) and too_deep(row):
        raise nested_too_deeply()
    return row, text


def _many_brackets(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > MAX_DEPTH


def _parse_slowly(file: File, text: str) -> Any:
    """Return the value of a JSON text that `_scan` rejects, or raise RowError with the reason.

    `json.loads` is slower, but it accepts leading spaces and describes errors.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise nested_too_deeply() from error
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except ValueError as error:  # Python limits the number of digits of an integer
        why = str(error).split(";")[0]
    raise RowError(
        "E-DATA-042",
        "invalid JSON",
        why=why,
        fix=f"write one object per line; if the file is one list: {_as_lines(file)}",
    )


def _as_lines(file: File) -> str:
    return f"jq -c '.[]' {shlex.quote(file.name)} > rows.jsonl and set data.path=rows.jsonl"
