"""Reader of CSV and TSV: a header, then records, which may span several lines inside quotes."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from forerun.data.source.column_pairs import shortened
from forerun.data.source.columns import MISSING_COLUMN, Columns, recognised
from forerun.data.source.files import File
from forerun.data.source.lines import CorruptFile, damaged, lines, no_rows
from forerun.data.source.rows import BadRow, RowError, RowPlace, SourceRow
from forerun.data.source.values import MAX_ROW_BYTES, checker, too_large

_MAX_FIELD = 2**31 - 1
_DELIMITERS = {"csv": ",", "tsv": "\t"}
CARRIED = ("text", "prompt/completion", "chosen/rejected", "alpaca")  # forms without lists


def recognise(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the columns in the header, or a BadRow for the file."""
    header = next(_records(file), None)
    if header is None:
        return no_rows(file).at(file.name, whole_file=True)
    if isinstance(header, BadRow):
        return header
    number, names, _ = header
    try:
        columns = recognised(names, given)
        _require_no_lists(file, columns)
        columns.require(names)
    except RowError as row_error:
        bad = row_error.at(file.name, number, whole_file=True)
        if bad.code == MISSING_COLUMN and not given and len(names) == 2:
            example = _DELIMITERS[file.kind].join(("prompt", "completion"))
            bad = replace(
                bad, fix=f"{bad.fix}; if line {number} is a row, write a line before it as header, such as {example}"
            )
        return bad
    return columns


def rows(file: File, columns: Columns) -> Iterator[SourceRow | BadRow]:
    """Yield the rows of a file, and a BadRow for each bad record. A bad header is a bad file."""
    check, names, found = checker(columns), None, False
    known = set(columns.read)
    for record in _records(file):
        if isinstance(record, BadRow):
            found = True
            if names is None:
                record = replace(record, what=f"the header: {record.what}", whole_file=True)
            yield record
            if record.whole_file:
                return
            continue
        number, fields, flaw = record
        try:
            if names is None:
                names = fields
                columns.require(names)
                places = [(name, at) for at, name in enumerate(names) if name in known]
                continue
            found = True
            if flaw is not None:
                raise flaw
            if len(fields) != len(names):
                raise RowError(
                    "E-DATA-049",
                    f"{len(fields)} fields, the header has {len(names)}",
                    why=f"header: {shortened(names)}",
                    fix="fix the row; put fields that contain a separator or a line end in quotes",
                )
            yield SourceRow(check({name: fields[at] for name, at in places}, ""), RowPlace(file.name, number))
        except RowError as row_error:
            yield row_error.at(file.name, number, whole_file=not found)
            if not found:
                return
    if not found:
        yield no_rows(file).at(file.name, whole_file=True)


class _LineFeed:
    """An iterator of lines for csv.reader.

    If a record cannot be read, `done(give_back=True)` makes its lines, except the first, available again.
    """

    def __init__(self, source: Iterator[bytes | int]) -> None:
        self._source = source
        self._waiting: deque[bytes | int] = deque()
        self._taken: list[bytes | int] = []
        self._size = 0
        self.number = 1  # line number of the first line of the record
        self.row_error: RowError | None = None  # for a line of the record that is not UTF-8

    def __iter__(self) -> _LineFeed:
        return self

    def __next__(self) -> str:
        line = self._waiting.popleft() if self._waiting else next(self._source)
        self._taken.append(line)
        self._size += line if isinstance(line, int) else len(line) + 1
        if isinstance(line, int) or self._size > MAX_ROW_BYTES:
            raise too_large(self._size)
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError as error:
            at = self.number + len(self._taken) - 1
            self.row_error = RowError(
                "E-DATA-050",
                "not UTF-8",
                why=f"byte {error.start} of line {at} is 0x{line[error.start]:02x}: {error.reason}",
                fix="fix or delete this row; if the file is Latin-1: iconv -f latin1 -t utf-8",
            )
            return line.decode(errors="surrogateescape") + "\n"

    def done(self, *, give_back: bool = False) -> None:
        """End the record. With `give_back`, continue with the line after its first one."""
        if give_back:
            self._waiting.extendleft(reversed(self._taken[1:]))
        self.number += 1 if give_back else len(self._taken)
        self._taken.clear()
        self._size, self.row_error = 0, None


def _records(file: File) -> Iterator[tuple[int, list[str], RowError | None] | BadRow]:
    """Yield (number of the first line, fields, error of a line or None) for each record, or a BadRow.

    After a record that cannot be read, a new record begins at the next line. An unclosed quote then costs one row,
    not the rest of the file.
    """
    csv.field_size_limit(_MAX_FIELD)
    with file.open() as stream:
        feed = _LineFeed(chain.from_iterable(lines(file, stream)))
        reader = csv.reader(feed, delimiter=_DELIMITERS[file.kind], strict=True)
        while True:
            try:
                fields = next(reader, None)
            except CorruptFile as error:
                number = feed.number - 1
                after = "after this line" if number else ""
                yield damaged(error, after).at(file.name, number or None, whole_file=True)
                return
            except RowError as row_error:
                yield row_error.at(file.name, feed.number)
                feed.done(give_back=True)
                continue
            except csv.Error as error:
                yield RowError(
                    "E-DATA-051",
                    f"this row cannot be read as {file.kind}",
                    why=str(error),
                    fix='fix the row; write a quote inside a quoted field as ""',
                ).at(file.name, feed.number)
                feed.done(give_back=True)
                continue
            if fields is None:
                return
            number, flaw = feed.number, feed.row_error
            feed.done()
            if fields:
                yield number, fields, flaw


def _require_no_lists(file: File, columns: Columns) -> None:
    """Raise RowError if the form has lists, which CSV cannot hold."""
    if columns.form not in CARRIED and columns.needed:
        raise RowError(
            "E-DATA-052",
            f"column {next(iter(columns.needed.values()))!r} cannot be read from {file.kind}",
            why=f"{file.kind} holds texts, and {columns.form} is a list",
            fix="use JSONL or Parquet",
        )
