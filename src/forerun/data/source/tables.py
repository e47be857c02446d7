"""Reader of Parquet and Arrow.

Parquet files are read by row groups, Arrow files (including Feather) by record batches, Arrow streams as one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forerun.config.column_template import COLUMNS
from forerun.data.source.columns import Columns, Shape, recognised
from forerun.data.source.files import File, library
from forerun.data.source.lines import CorruptFile, damage, damaged, no_rows
from forerun.data.source.rows import BadRow, FilePiece, RowError, RowPlace, SourceRow
from forerun.data.source.values import MAX_ROW_BYTES, Check, checker, too_large
from forerun.errors import first_line

_BATCH_ROWS = 256
_IMPOSSIBLE_BYTES = 1 << 44
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")


@dataclass(frozen=True)
class _Table:
    """An open file. Its `groups` of rows can be read independently; a stream has one group."""

    schema: Any
    groups: int
    group_bytes: Any  # function of a group: its size in bytes
    group_rows: Any  # function of a group: its number of rows
    batches: Any  # function of a group and column names: its record batches


def recognise(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the columns in the schema, or a BadRow for the file."""
    try:
        with _open_table(file) as table:
            columns = recognised(table.schema.names, given, _shapes(table.schema))
            _require(table.schema, columns)
            return columns
    except CorruptFile as error:
        return damaged(error).at(file.name, whole_file=True)
    except RowError as row_error:
        return row_error.at(file.name, whole_file=True)


def rows(file: File, columns: Columns, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    """Yield the rows of the groups of `piece`, numbered from 1, and a BadRow for each bad one.

    Damage ends the piece: the last value is then a BadRow with the number of the last good row.
    """
    check, number = checker(columns), 0
    try:
        with _open_table(file) as table:
            _require(table.schema, columns)
            names = [name for name in columns.read if name in table.schema.names]
            for group in range(piece.start, min(piece.stop, table.groups)):
                for batch in _slices(file, table.batches(group, names)):
                    for made in _batch_rows(batch, names, check, file, number):
                        yield made
                        number += 1
            if number == 0 and piece.start == 0:
                yield no_rows(file).at(file.name, whole_file=True)
    except CorruptFile as error:
        first = number == 0 and piece.start == 0
        place = None if first else number
        yield damaged(error, "" if first else "after this row").at(file.name, place, "row", whole_file=True)
    except RowError as row_error:
        yield row_error.at(file.name, whole_file=True)


def pieces(file: File, at: int, piece_bytes: int) -> list[FilePiece]:
    """Return pieces of consecutive groups, each of about `piece_bytes`. A damaged file is one piece."""
    try:
        with _open_table(file) as table:
            borders, held = [0], 0
            for group in range(table.groups):
                if held >= piece_bytes:
                    borders.append(group)
                    held = 0
                held += table.group_bytes(group)
            borders.append(max(table.groups, 1))
    except CorruptFile:
        borders = [0, 1]
    return [FilePiece(at, start, stop) for start, stop in pairwise(borders)]


def before(file: File, piece: FilePiece) -> int:
    """Return the number of rows before the piece. Rows in damaged groups are not counted."""
    if piece.start == 0:
        return 0
    count = 0
    with _open_table(file) as table:
        for group in range(piece.start):
            try:
                count += table.group_rows(group)
            except Exception as error:
                fault = _error_for(file, error)
                if not isinstance(fault, CorruptFile):
                    raise fault from error
    return count


@contextmanager
def _open_table(file: File) -> Iterator[_Table]:
    """Open a file for the duration of a block. Raise CorruptFile for damage, and UserError for other failures."""
    arrow = library("pyarrow", file.name)
    with ExitStack() as closing:
        stream = closing.enter_context(file.open())
        try:
            if file.store is None:
                kind = arrow.OSFile if file.kind == "parquet" else arrow.memory_map
                stream = closing.enter_context(kind(file.path))
            opened = _parquet(file, stream) if file.kind == "parquet" else _arrow(file, stream)
        except Exception as error:
            raise _error_for(file, error) from error
        yield opened


def _parquet(file: File, stream: Any) -> _Table:
    table = library("pyarrow.parquet", file.name).ParquetFile(stream, page_checksum_verification=True)
    about = table.metadata
    return _Table(
        table.schema_arrow,
        about.num_row_groups,
        lambda group: about.row_group(group).total_byte_size,
        lambda group: about.row_group(group).num_rows,
        lambda group, names: table.iter_batches(_BATCH_ROWS, [group], names, use_threads=False),
    )


def _arrow(file: File, stream: Any) -> _Table:
    ipc = library("pyarrow.ipc", file.name)
    size = stream.seek(0, 2)
    stream.seek(0)
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not is_file:
        table = ipc.open_stream(stream)
        return _Table(
            table.schema, 1, lambda group: size, lambda group: 0, lambda group, names: _streamed(table, stream)
        )
    table = ipc.open_file(stream)
    count = table.num_record_batches

    def group_rows(group: int) -> int:
        return int(table.get_batch(group).num_rows)

    def batches(group: int, names: list[str]) -> Iterator[Any]:
        yield table.get_batch(group)

    return _Table(table.schema, count, lambda group: size / count, group_rows, batches)


def _streamed(table: Any, stream: Any) -> Iterator[Any]:
    """Yield the batches of a stream. Raise EOFError if the stream does not end with its end mark.

    pyarrow does not report a stream that was truncated between two batches.
    """
    yield from table
    end = stream.seek(0, 2)
    stream.seek(max(0, end - len(_STREAM_END)))
    if stream.read(len(_STREAM_END)) != _STREAM_END:
        raise EOFError("the end mark of the Arrow stream is missing")


def _slices(file: File, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches in slices of at most _BATCH_ROWS rows. Raise CorruptFile or UserError if reading fails."""
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise _error_for(file, error) from error
        if batch is None:
            return
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)


def _error_for(file: File, error: Exception) -> Exception:
    """Return the exception for an error of pyarrow: CorruptFile for damage, otherwise the result of `damage`.

    pyarrow reports damage with its own exceptions or with an OSError without errno. An OSError with errno comes from
    the system. A MemoryError is damage only if it asks for more than 16 TiB: no valid file needs that much.
    """
    bare = type(error) is OSError and not error.errno
    own = "ArrowException" in {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError):
        own = max(map(int, re.findall(r"\d+", str(error))), default=0) > _IMPOSSIBLE_BYTES
    if bare or own or isinstance(error, UnicodeDecodeError):
        return CorruptFile(first_line(error))
    return damage(file, error)


def _batch_rows(batch: Any, names: list[str], check: Check, file: File, before: int) -> Iterator[SourceRow | BadRow]:
    """Yield the rows of one batch as Python values, and a BadRow for each bad one. `before` rows precede them."""
    number = before
    for part in _valid_parts(batch.select(names)):
        held = None if isinstance(part, RowError) else [_python_values(part.column(name)) for name in names]
        for at in range(1 if isinstance(part, RowError) else part.num_rows):
            number += 1
            try:
                if held is None:
                    raise part
                values = {name: column[at] for name, column in zip(names, held, strict=True)}
                yield SourceRow(check(values, ""), RowPlace(file.name, number, "row"))
            except RowError as row_error:
                yield row_error.at(file.name, number, "row")


def _valid_parts(batch: Any) -> Iterator[Any]:
    """Yield the valid parts of a batch, and a RowError for each row that is too large or not UTF-8.

    The batch is halved recursively to find these rows. Raise CorruptFile for other damage.
    """
    fault: RowError | None = None
    try:
        batch.validate(full=True)
        size = sum(_unshared(column).nbytes for column in batch.columns)
        fault = too_large(size) if size > MAX_ROW_BYTES else None
    except Exception as error:
        why = first_line(error)
        if batch.num_rows == 1 and "UTF8" not in why:
            raise CorruptFile(why) from error
        fault = RowError("E-DATA-060", "not UTF-8", why=why, fix="write the file again without this row")
    if fault is None:
        yield batch
    elif batch.num_rows == 1:
        yield fault
    else:
        half = batch.num_rows // 2
        yield from _valid_parts(batch.slice(0, half))
        yield from _valid_parts(batch.slice(half))


def _unshared(column: Any) -> Any:
    """Return the column in a type whose `nbytes` counts its values, not buffers shared with other slices."""
    type_name = str(column.type)
    if type_name.startswith("dictionary<"):
        return column.dictionary_decode()
    return column.cast("large_string") if type_name == "string_view" else column


def _python_values(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return [_without_nulls(value) for value in values] if "struct<" in str(column.type) else values


def _without_nulls(value: Any) -> Any:
    """Return `value` without the null fields of structs.

    Every struct has all fields of its type, so null usually means that the row does not have the field. The main
    fields of messages are kept, because the checks of messages handle null in them.
    """
    if isinstance(value, list):
        return [_without_nulls(held) for held in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(held)
            for key, held in value.items()
            if held is not None or key in ("role", "content", "from", "value")
        }
    return value


def _require(schema: Any, columns: Columns) -> None:
    """Raise RowError if a needed column is missing, or if the type of a column cannot hold its role."""
    columns.require(schema.names)
    for role, name in columns.known.items():
        if name in schema.names and not _can_hold(_type(schema, name), role, columns.form):
            wanted = {"messages": "a list of messages", "input_ids": "a list of token ids"}.get(role, "text")
            raise _wrong_column(
                schema,
                name,
                "a list of 0 and 1" if role == "loss_mask" else wanted,
                f"name another column: data.columns.{role}=NAME"
                if role in COLUMNS
                else f"write {name} again as a list of integers or booleans, or remove it",
            )
    for role, template in columns.templates.items():
        for name in template.columns:
            if not _is_text(_type(schema, name)) and not str(_type(schema, name)).startswith(("int", "uint")):
                wanted = "text or whole numbers, which the template needs"
                raise _wrong_column(schema, name, wanted, f"remove {{{name}}} from data.columns.{role}")


def _wrong_column(schema: Any, name: str, wanted: str, fix: str) -> RowError:
    return RowError(
        "E-DATA-061",
        f"column {name!r} holds {_type(schema, name)}, not {wanted}",
        why="this is its type in the schema of the file",
        fix=fix,
    )


def _type(schema: Any, name: str) -> Any:
    """Return the type of the values of a column."""
    kind = schema.field(name).type
    while str(kind).startswith("dictionary<"):
        kind = kind.value_type
    return kind


def _shapes(schema: Any) -> dict[str, Shape]:
    """Return the shape of the values of each column. Of two columns with one name, the result has neither."""
    found: dict[str, Shape] = {}
    for name in schema.names:
        if schema.names.count(name) == 1 and str(_type(schema, name)).startswith(_LISTS):
            inner = _type(schema, name).value_type
            fields = _fields(inner)
            found[name] = "ShareGPT" if "from" in fields and "role" not in fields else "list"
            if str(inner).startswith(("int", "uint")):
                found[name] = "integers"
    return found


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _fields(kind: Any) -> set[str]:
    """Return the names of the fields of a struct, or an empty set for another type."""
    return {kind.field(at).name for at in range(kind.num_fields)} if str(kind).startswith("struct<") else set()


def _can_hold(kind: Any, role: str, form: str) -> bool:
    text = _is_text(kind)
    only_text = ("text", "instruction", "output") + (("prompt", "completion") if form == "prompt/completion" else ())
    if role in only_text:
        return text
    if role == "tools":
        return text or str(kind) == "null" or str(kind).startswith(_LISTS)
    if role == "input":
        return text or str(kind) == "null"
    listed = str(kind).startswith(_LISTS)
    inner: Any = kind.value_type if listed else None
    if role in ("input_ids", "loss_mask"):
        return listed and (str(inner).startswith(("int", "uint")) or (role == "loss_mask" and str(inner) == "bool"))
    fields = _fields(inner) if listed else set()
    return {"role", "content"} <= fields or {"from", "value"} <= fields or (text and role != "messages")
