"""Reading CSV and TSV: a header, then records that may go over several lines inside quotes."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain

from forerun.data.source.columns import Columns, Unfit, recognised, shortened
from forerun.data.source.files import File
from forerun.data.source.lines import Damaged, damaged, lines, no_rows
from forerun.data.source.rows import Bad, Place, Row
from forerun.data.source.values import MAX_ROW_BYTES, checker, too_large

_MAX_FIELD = 2**31 - 1
_DELIMITERS = {"csv": ",", "tsv": "\t"}
CARRIED = ("text", "prompt/completion", "chosen/rejected")


def recognise(file: File, given: Mapping[str, str]) -> Columns | Bad:
    """The form of the header's columns."""
    header = next(_records(file), None)
    if header is None:
        return no_rows(file).at(file.name, whole_file=True)
    if isinstance(header, Bad):
        return header
    number, names, _ = header
    try:
        columns = recognised(names, given)
        _carried(file, columns)
        columns.require(names)
    except Unfit as unfit:
        return unfit.at(file.name, number, whole_file=True)
    return columns


def rows(file: File, columns: Columns) -> Iterator[Row | Bad]:
    check, names, found = checker(columns), None, False
    known = set(columns.known.values())
    for record in _records(file):
        if isinstance(record, Bad):
            found = True
            if names is None:
                record = Bad(record.place, f"the header: {record.what}", record.why, record.fix, whole_file=True)
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
                raise Unfit(
                    f"{len(fields)} fields, the header has {len(names)}",
                    why=f"header: {shortened(names)}",
                    fix="mend the row; a field with a separator or a line end in it is put in quotes",
                )
            yield Row(check({name: fields[at] for name, at in places}, ""), Place(file.name, number))
        except Unfit as unfit:
            yield unfit.at(file.name, number, whole_file=not found)
            if not found:
                return
    if not found:
        yield no_rows(file).at(file.name, whole_file=True)


class _Feed:
    """Lines for csv.reader; those of the record that is being read can be given back, all but the first."""

    def __init__(self, source: Iterator[bytes | int]) -> None:
        self._source = source
        self._waiting: deque[bytes | int] = deque()
        self._taken: list[bytes | int] = []
        self._size = 0
        self.number = 1  # of the line that the record begins with
        self.unfit: Unfit | None = None

    def __iter__(self) -> _Feed:
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
            self.unfit = Unfit(
                "not UTF-8",
                why=f"byte {error.start} of line {at} is 0x{line[error.start]:02x}: {error.reason}",
                fix="mend or delete this row; if all is Latin-1: iconv -f latin1 -t utf-8",
            )
            return line.decode(errors="surrogateescape") + "\n"

    def done(self, *, give_back: bool = False) -> None:
        """The record is read; or, to begin anew with the line after its first, it was none."""
        if give_back:
            self._waiting.extendleft(reversed(self._taken[1:]))
        self.number += 1 if give_back else len(self._taken)
        self._taken.clear()
        self._size, self.unfit = 0, None


def _records(file: File) -> Iterator[tuple[int, list[str], Unfit | None] | Bad]:
    """Records with the line they begin at. After a record that cannot be read the next line begins a new one."""
    csv.field_size_limit(_MAX_FIELD)
    with file.open() as stream:
        feed = _Feed(chain.from_iterable(lines(file, stream)))
        reader = csv.reader(feed, delimiter=_DELIMITERS[file.kind], strict=True)
        while True:
            try:
                fields = next(reader, None)
            except Damaged as error:
                number = feed.number - 1
                after = "after this line" if number else ""
                yield damaged(error, after).at(file.name, number or None, whole_file=True)
                return
            except Unfit as unfit:
                yield unfit.at(file.name, feed.number)
                feed.done(give_back=True)
                continue
            except csv.Error as error:
                yield Unfit(
                    f"this row cannot be read as {file.kind}",
                    why=str(error),
                    fix='mend the row; a quote inside a quoted field is written ""',
                ).at(file.name, feed.number)
                feed.done(give_back=True)
                continue
            if fields is None:
                return
            number, flaw = feed.number, feed.unfit
            feed.done()
            if fields:
                yield number, fields, flaw


def _carried(file: File, columns: Columns) -> None:
    if columns.form not in CARRIED:
        raise Unfit(
            f"column {columns.name(columns.form)!r} cannot be read from {file.kind}",
            why=f"{file.kind} holds texts, and {columns.form} is a list",
            fix="give it as JSONL or Parquet",
        )
