"""Reading the texts of one file, row after row. The first bad row stops it, with the file and the row named."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from typing import Any

from forerun.data import text
from forerun.data.columns import TextColumn
from forerun.data.files import File, library, unreadable
from forerun.errors import UserError

_BATCH_ROWS = 256
_MAX_FIELD = 2**31 - 1


def texts(file: File, column: TextColumn) -> Iterator[str]:
    """Every text of `file`, in its order; a plain text file is one text."""
    if file.kind == "text":
        yield _plain(file)
        return
    found = False
    for value in _READERS[file.kind](file, column):
        found = True
        yield value
    if not found:
        raise UserError(
            f"{file.name} holds no rows",
            why=f"read as {file.kind} to its end",
            fix="fill it or move it out of data.path",
        )


def lines(file: File) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, their ends kept; a byte order mark at the very front is left out."""
    number = 0
    with file.open() as stream:
        while True:
            try:
                raw = stream.readline()
            except Exception as error:  # each packer and driver has errors of its own
                raise _damaged(file, f"after line {number}" if number else "", error) from error
            if not raw:
                return
            number += 1
            yield number, _decoded(raw, file, number)


def _plain(file: File) -> str:
    with file.open() as stream:
        try:
            raw = stream.read()
        except Exception as error:  # each packer and driver has errors of its own
            raise _damaged(file, "", error) from error
    return text.decoded(raw, file.name)


def _decoded(raw: bytes, file: File, number: int) -> str:
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file.name}, line {number}: not UTF-8",
            why=f"byte {error.start} of the line is 0x{raw[error.start]:02x}: {error.reason}",
            fix="mend or delete this line; if all is Latin-1: iconv -f latin1 -t utf-8",
        ) from error
    return line.removeprefix("\ufeff") if number == 1 else line


def _jsonl(file: File, column: TextColumn) -> Iterator[str]:
    for number, line in lines(file):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise UserError(
                f"{where}: invalid JSON",
                why=why,
                fix=f"one object per line is read; a file that is one list: {_as_lines(file)}",
            ) from error
        if not isinstance(row, dict):
            raise UserError(
                f"{where}: not an object",
                why=f'the line is a {type(row).__name__}; each line is one object such as {{"text": "..."}}',
                fix=f"mend the line; a file that is one list: {_as_lines(file)}",
            )
        if column.name not in row:
            column.require(row, where)
        yield column.text(row[column.name], where)


def _as_lines(file: File) -> str:
    return f"jq -c '.[]' {file.name} > rows.jsonl"


def _separated(file: File, column: TextColumn, delimiter: str) -> Iterator[str]:
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader((line for _, line in lines(file)), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        where = f"{file.name}, line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{where}: this row cannot be read as {file.kind}",
                why=str(error),
                fix='mend the row; a quote inside a quoted field is written ""',
            ) from error
        if row is None:
            return
        if not row:
            continue
        if names is None:
            names = row
            column.require(names, where)
            place = names.index(column.name)
        elif len(row) != len(names):
            raise UserError(
                f"{where}: {len(row)} fields, the header has {len(names)}",
                why=f"header: {', '.join(names)}",
                fix="mend the row; a field with a separator or a line end in it is put in quotes",
            )
        else:
            yield column.text(row[place], where)


def _parquet(file: File, column: TextColumn) -> Iterator[str]:
    arrow, parquet = library("pyarrow", file.name), library("pyarrow.parquet", file.name)
    with file.open() as stream:
        try:
            table = parquet.ParquetFile(stream)
            schema = table.schema_arrow
        except (arrow.ArrowException, OSError) as error:
            raise _damaged(file, "", error) from error
        _require_text_type(arrow, schema, column, file)
        yield from _values(arrow, table.iter_batches(_BATCH_ROWS, columns=[column.name]), column, file)


def _arrow(file: File, column: TextColumn) -> Iterator[str]:
    """The file format (Feather too) and the stream format, which Hugging Face datasets writes."""
    arrow, ipc = library("pyarrow", file.name), library("pyarrow.ipc", file.name)
    with file.open() as stream:
        try:
            whole = stream.read(6) == b"ARROW1"
            stream.seek(0)
            table = ipc.open_file(stream) if whole else ipc.open_stream(stream)
        except (arrow.ArrowException, OSError) as error:
            raise _damaged(file, "", error) from error
        _require_text_type(arrow, table.schema, column, file)
        batches = map(table.get_batch, range(table.num_record_batches)) if whole else iter(table)
        yield from _values(arrow, batches, column, file)


def _require_text_type(arrow: Any, schema: Any, column: TextColumn, file: File) -> None:
    column.require(schema.names, file.name)
    kind = schema.field(column.name).type
    held = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if (
        not any(check(held) for check in (arrow.types.is_string, arrow.types.is_large_string))
        and str(held) != "string_view"
    ):
        raise UserError(
            f"{file.name}: column {column.name!r} holds {kind}, not text",
            why="its schema says so",
            fix="name another column: data.columns.text=NAME",
        )


def _values(arrow: Any, batches: Iterator[Any], column: TextColumn, file: File) -> Iterator[str]:
    row = 0
    while True:
        try:
            batch = next(batches, None)
        except (arrow.ArrowException, OSError) as error:
            raise _damaged(file, f"after row {row}" if row else "", error) from error
        if batch is None:
            return
        for value in batch.column(column.name):
            row += 1
            try:
                held = value.as_py()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file.name}, row {row}: not UTF-8", why=str(error), fix="write the file anew without this row"
                ) from error
            yield column.text(held, f"{file.name}, row {row}")


def _damaged(file: File, place: str, error: Exception) -> UserError:
    if isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError):
        return unreadable(file.name, error)
    what = f"{file.name} is cut short or damaged" + (f" {place}" if place else "")
    return UserError(
        what, why=str(error).splitlines()[0] if str(error) else type(error).__name__, fix="fetch or write it anew"
    )


_READERS: dict[str, Callable[[File, TextColumn], Iterator[str]]] = {
    "jsonl": _jsonl,
    "csv": lambda file, column: _separated(file, column, ","),
    "tsv": lambda file, column: _separated(file, column, "\t"),
    "parquet": _parquet,
    "arrow": _arrow,
}
