"""Reading Parquet by row groups, and Arrow: the file format (Feather too) by record batches, and the stream format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forerun.data.source.columns import Columns, Unfit, recognised
from forerun.data.source.files import File, library
from forerun.data.source.lines import Damaged, damage, damaged, no_rows
from forerun.data.source.rows import Bad, Piece, Place, Row
from forerun.data.source.values import MAX_ROW_BYTES, Check, checker, too_large

_BATCH_ROWS = 256
_MORE_THAN_ANY_BYTES = 1 << 44
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")


@dataclass(frozen=True)
class _Table:
    """An open file: `groups` of rows that can be read on their own; a stream has one."""

    schema: Any
    groups: int
    group_bytes: Any  # of group i
    group_rows: Any
    batches: Any  # of group i, those columns


def recognise(file: File, given: Mapping[str, str]) -> Columns | Bad:
    """The form of the schema's columns."""
    try:
        with _opened(file) as table:
            columns = recognised(table.schema.names, given)
            _require(table.schema, columns)
            return columns
    except Damaged as error:
        return damaged(error).at(file.name, whole_file=True)
    except Unfit as unfit:
        return unfit.at(file.name, whole_file=True)


def rows(file: File, columns: Columns, piece: Piece) -> Iterator[Row | Bad]:
    check, number = checker(columns), 0
    try:
        with _opened(file) as table:
            _require(table.schema, columns)
            names = [name for name in columns.known.values() if name in table.schema.names]
            for group in range(piece.start, min(piece.stop, table.groups)):
                for batch in _safely(file, table.batches(group, names)):
                    for made in _batch_rows(batch, names, check, file, number):
                        yield made
                        number += 1
            if number == 0 and piece.start == 0:
                yield no_rows(file).at(file.name, whole_file=True)
    except Damaged as error:
        first = number == 0 and piece.start == 0
        place = None if first else number
        yield damaged(error, "" if first else "after this row").at(file.name, place, "row", whole_file=True)
    except Unfit as unfit:
        yield unfit.at(file.name, whole_file=True)


def pieces(file: File, at: int, piece_bytes: int) -> list[Piece]:
    """Groups put together until they have `piece_bytes`; one piece if the file cannot be opened."""
    try:
        with _opened(file) as table:
            borders, held = [0], 0
            for group in range(table.groups):
                if held >= piece_bytes:
                    borders.append(group)
                    held = 0
                held += table.group_bytes(group)
            borders.append(max(table.groups, 1))
    except Damaged:
        borders = [0, 1]
    return [Piece(at, start, stop) for start, stop in pairwise(borders)]


def before(file: File, piece: Piece) -> int:
    """How many rows stand before the piece; those of a damaged batch cannot be counted, and are not."""
    if piece.start == 0:
        return 0
    count = 0
    with _opened(file) as table:
        for group in range(piece.start):
            try:
                count += table.group_rows(group)
            except Exception as error:
                fault = _fault(file, error)
                if not isinstance(fault, Damaged):
                    raise fault from error
    return count


@contextmanager
def _opened(file: File) -> Iterator[_Table]:
    arrow = library("pyarrow", file.name)
    with ExitStack() as closing:
        stream = closing.enter_context(file.open())
        try:
            if file.store is None:
                kind = arrow.OSFile if file.kind == "parquet" else arrow.memory_map
                stream = closing.enter_context(kind(file.path))
            opened = _parquet(file, stream) if file.kind == "parquet" else _arrow(file, stream)
        except Exception as error:
            raise _fault(file, error) from error
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
    whole = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not whole:
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
    """The batches of a stream, which ends with a mark; without it the file was cut between two batches."""
    yield from table
    end = stream.seek(0, 2)
    stream.seek(max(0, end - len(_STREAM_END)))
    if stream.read(len(_STREAM_END)) != _STREAM_END:
        raise EOFError("the mark that ends an Arrow stream is not there")


def _safely(file: File, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            raise _fault(file, error) from error
        if batch is None:
            return
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)


def _fault(file: File, error: Exception) -> Exception:
    """pyarrow tells of damage by its own errors and by a bare OSError; one with a number is the system's.

    Memory that runs out is no damage, unless more was asked for than any machine has.
    """
    bare = type(error) is OSError and not error.errno
    own = "ArrowException" in {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError):
        own = max(map(int, re.findall(r"\d+", str(error))), default=0) > _MORE_THAN_ANY_BYTES
    if bare or own or isinstance(error, UnicodeDecodeError):
        return Damaged(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return damage(file, error)


def _batch_rows(batch: Any, names: list[str], check: Check, file: File, before: int) -> Iterator[Row | Bad]:
    """The rows of one batch, in Python's own types."""
    number = before
    for part in _sound(batch.select(names)):
        held = None if isinstance(part, Unfit) else [_plain(part.column(name)) for name in names]
        for at in range(1 if isinstance(part, Unfit) else part.num_rows):
            number += 1
            try:
                if held is None:
                    raise part
                values = {name: column[at] for name, column in zip(names, held, strict=True)}
                yield Row(check(values, ""), Place(file.name, number, "row"))
            except Unfit as unfit:
                yield unfit.at(file.name, number, "row")


def _sound(batch: Any) -> Iterator[Any]:
    """The batch in parts that can be trusted, halved around rows that cannot; each of those is an Unfit."""
    fault: Unfit | None = None
    try:
        batch.validate(full=True)
        size = sum(_decoded(column).nbytes for column in batch.columns)
        fault = too_large(size) if size > MAX_ROW_BYTES else None
    except Exception as error:
        why = str(error).splitlines()[0]
        if batch.num_rows == 1 and "UTF8" not in why:
            raise Damaged(why) from error
        fault = Unfit("not UTF-8", why=why, fix="write the file anew without this row")
    if fault is None:
        yield batch
    elif batch.num_rows == 1:
        yield fault
    else:
        half = batch.num_rows // 2
        yield from _sound(batch.slice(0, half))
        yield from _sound(batch.slice(half))


def _decoded(column: Any) -> Any:
    """A column whose size is that of its own values, not of buffers that it shares with others."""
    said = str(column.type)
    if said.startswith("dictionary<"):
        return column.dictionary_decode()
    return column.cast("large_string") if said == "string_view" else column


def _plain(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return [_without_nulls(value) for value in values] if "struct<" in str(column.type) else values


def _without_nulls(value: Any) -> Any:
    """A struct has every field of its type in each row; a field that is null was not given, but for `content`."""
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
    """The columns are there, and their types can hold what the form says."""
    columns.require(schema.names)
    for role, name in columns.known.items():
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        while str(kind).startswith("dictionary<"):
            kind = kind.value_type
        if not _can_hold(kind, role, columns.form):
            wanted = {"messages": "a list of messages", "input_ids": "a list of token ids"}.get(role, "text")
            raise Unfit(
                f"column {name!r} holds {kind}, not {'a list of 0 and 1' if role == 'loss_mask' else wanted}",
                why="its schema says so",
                fix=f"name another column: data.columns.{role}=NAME",
            )


def _can_hold(kind: Any, role: str, form: str) -> bool:
    said = str(kind)
    text = said in ("string", "large_string", "string_view")
    if role in ("text", "completion") or (role == "prompt" and form == "prompt/completion"):
        return text
    listed = said.startswith(_LISTS)
    inner: Any = kind.value_type if listed else None
    if role in ("input_ids", "loss_mask"):
        return listed and (str(inner).startswith(("int", "uint")) or (role == "loss_mask" and str(inner) == "bool"))
    messages = listed and str(inner).startswith("struct<")
    if messages:
        fields = {inner.field(at).name for at in range(inner.num_fields)}
        messages = {"role", "content"} <= fields or {"from", "value"} <= fields
    return messages or (text and role != "messages")
