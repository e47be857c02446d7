"""Reading JSON lines, the whole file or a range of its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise
from typing import Any

from forerun.data.source.columns import Columns, Unfit, recognised
from forerun.data.source.files import File
from forerun.data.source.lines import Damaged, damaged, lines, newlines, no_rows
from forerun.data.source.rows import Bad, Piece, Place, Row
from forerun.data.source.values import MAX_DEPTH, checker, nested_too_deeply, too_deep, too_large

_LOOKED_AT = 1000
_NESTED = frozenset((list, dict))
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # json.loads without its layers


def recognise(file: File, given: Mapping[str, str]) -> Columns | Bad:
    """The form of the first line that has one, among the first thousand; without any, what is wrong with the first."""
    first: Bad | None = None
    with file.open() as stream:
        numbered = enumerate(islice(chain.from_iterable(lines(file, stream)), _LOOKED_AT), 1)
        while True:
            number = 0
            try:
                number, line = next(numbered, (0, b""))
                if not number:
                    return first or no_rows(file).at(file.name, whole_file=True)
                row = _parsed(file, line)[0]
                if row is not None:
                    return recognised(row, given)
            except Damaged as error:
                return first or damaged(error).at(file.name, whole_file=True)
            except Unfit as unfit:
                first = first or unfit.at(file.name, number)


def rows(file: File, columns: Columns, piece: Piece) -> Iterator[Row | Bad]:
    check, name = checker(columns), file.name
    start, stop = (0, -1) if file.packed else (piece.start, piece.stop)
    number, found = 0, False
    with file.open() as stream:
        try:
            for line in chain.from_iterable(lines(file, stream, start, stop)):
                number += 1
                try:
                    row, text = _parsed(file, line)
                    if row is None:
                        continue
                    yield Row(check(row, text), Place(name, number))
                except Unfit as unfit:
                    yield unfit.at(name, number)
                found = True
        except Damaged as error:
            after = "after this line" if number else ""
            yield damaged(error, after).at(name, number if number or start else None, whole_file=True)
            return
    if not found and start == 0 and (stop < 0 or stop >= file.size_bytes()):
        yield no_rows(file).at(name, whole_file=True)


def pieces(file: File, at: int, piece_bytes: int) -> list[Piece]:
    size = file.size_bytes()
    if file.packed or size < 0 or not file.seekable():
        return [Piece(at, 0, size if file.packed else -1)]
    count = max(1, round(size / piece_bytes))
    borders = [size * part // count for part in range(count + 1)]
    return [Piece(at, start, stop) for start, stop in pairwise(borders)]


def before(file: File, piece: Piece) -> int:
    """How many lines begin before the piece."""
    return 0 if file.packed or piece.start == 0 else 1 + newlines(file, piece.start - 1)


def _parsed(file: File, line: bytes | int) -> tuple[dict[str, Any] | None, str]:
    """The object in `line`, None for a blank line; and the line as text."""
    if isinstance(line, int):
        raise too_large(line)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise Unfit(
            "not UTF-8",
            why=f"byte {error.start} of the line is 0x{line[error.start]:02x}: {error.reason}",
            fix="mend or delete this line; if all is Latin-1: iconv -f latin1 -t utf-8",
        ) from error
    try:
        row, end = _scan(text, 0)
        if end != len(text) and text[end:].strip(" \t\r"):
            raise StopIteration
    except (StopIteration, ValueError, RecursionError):
        if not text.strip():
            return None, text
        row = _loaded(file, text)
    if type(row) is not dict:
        raise Unfit(
            "not an object",
            why=f'the line is a {type(row).__name__}; each line is one object such as {{"text": "..."}}',
            fix=f"mend the line; a file that is one list: {_as_lines(file)}",
        )
    if not _NESTED.isdisjoint(map(type, row.values())) and _many_brackets(line) and too_deep(row):
        raise nested_too_deeply()
    return row, text


def _many_brackets(line: bytes) -> bool:
    return line.count(b"[") + line.count(b"{") > MAX_DEPTH


def _loaded(file: File, text: str) -> Any:
    """The slow way, with spaces in front and the reason of a failure."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise nested_too_deeply() from error
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except ValueError as error:  # Python's own limit for the digits of an integer
        why = str(error).split(";")[0]
    raise Unfit("invalid JSON", why=why, fix=f"one object per line is read; a file that is one list: {_as_lines(file)}")


def _as_lines(file: File) -> str:
    return f"jq -c '.[]' {file.name} > rows.jsonl"
