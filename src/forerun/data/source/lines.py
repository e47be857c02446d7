"""Lines of a byte stream.

A line that is too long is measured, but not held in memory. Damaged bytes raise CorruptFile, failed reads raise
UserError.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO, cast

from forerun.data.source.files import BadZstd, File, unreadable
from forerun.data.source.rows import FilePiece, RowError
from forerun.data.source.values import MAX_ROW_BYTES
from forerun.errors import UserError, first_line

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CorruptFile(Exception):
    """An error for a file that is truncated or does not have the format that its ending names."""


def lines(file: File, stream: BinaryIO, start: int = 0, stop: int = -1) -> Iterator[list[bytes | int]]:
    """Yield the lines whose first byte is in start..stop, in one list per block and without their newlines.

    A line above MAX_ROW_BYTES is replaced by its size. A byte order mark at the start of the file is removed. A
    `stop` of -1 is the end of the file.
    """
    at = max(start - 1, 0)
    if at:
        stream.seek(at)
    skip = start > 0  # the line that contains byte start - 1 belongs to the previous piece
    for found, size in _split(file, stream):
        kept = found
        if 0 <= stop < at + size:
            kept, begin = [], at
            for line in found:
                if begin >= stop and not (skip and begin == at):
                    break
                kept.append(line)
                begin += _size(line) + 1
        if at == 0 and not skip and kept and isinstance(kept[0], bytes):
            kept[0] = kept[0].removeprefix(BYTE_ORDER_MARK)
        yield kept[1:] if skip else kept
        if kept is not found:
            return
        skip, at = False, at + size


def byte_pieces(file: File, at: int, piece_bytes: int) -> list[FilePiece]:
    """Return pieces of about `piece_bytes` each, or one piece if the file must be read from its start."""
    size = file.size_bytes()
    if file.packed or size < 0 or not file.seekable():
        return [FilePiece(at, 0, size if file.packed else -1)]
    count = max(1, round(size / piece_bytes))
    return [FilePiece(at, start, stop) for start, stop in pairwise(size * part // count for part in range(count + 1))]


def newlines(file: File, stop: int) -> int:
    """Return the number of newlines before byte `stop`."""
    count = 0
    with file.open() as stream:
        while stop > 0 and (block := stream.read(min(BLOCK_BYTES, stop))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def blocks(file: File, stream: BinaryIO) -> Iterator[bytes]:
    """Yield the stream in blocks. Raise CorruptFile if the bytes are damaged, and UserError if the storage fails."""
    # For a damaged file, read1 returns the bytes before the damage. read would raise an error and lose them.
    read: Any = getattr(stream, "read1", stream.read) if file.packed else stream.read
    while True:
        try:
            block = read(BLOCK_BYTES)
        except Exception as error:  # each decompressor and driver raises its own errors
            raise damage(file, error) from error
        if not block:
            return
        yield block


def damage(file: File, error: Exception) -> Exception:
    """Return a CorruptFile if the bytes are damaged, or a UserError if the read failed and may succeed later."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, BadZstd)):
        return CorruptFile(first_line(error))
    return error if isinstance(error, UserError) else unreadable(file.name, error)


def damaged(error: Exception, after: str = "") -> RowError:
    """Return the error for a damaged file. `after` names the last good row, for example "after this line"."""
    what = f"the file is truncated or damaged {after}".rstrip()
    return RowError("E-DATA-044", what, why=str(error), fix="download or write the file again")


def no_rows(file: File) -> RowError:
    """Return the error for a file without rows."""
    return RowError(
        "E-DATA-045",
        "holds no rows",
        why=f"the file was read as {file.kind} to its end",
        fix="add rows, or move the file out of data.path",
    )


def _split(file: File, stream: BinaryIO) -> Iterator[tuple[list[bytes | int], int]]:
    """Yield lists of complete lines, and their size in bytes including the newlines."""
    held: list[bytes] = []
    size = 0
    for block in blocks(file, stream):
        found: list[bytes | int] = list(block.split(b"\n"))
        first = cast(bytes, found[0])
        size += len(first)
        if size <= MAX_ROW_BYTES:
            held.append(first)
        else:
            held.clear()
        if len(found) == 1:
            continue
        last = cast(bytes, found.pop())
        found[0] = b"".join(held) if size <= MAX_ROW_BYTES else size
        yield found, size - len(first) + len(block) - len(last)
        held, size = [last], len(last)
    if size:
        yield [b"".join(held) if size <= MAX_ROW_BYTES else size], size


def _size(line: bytes | int) -> int:
    return line if isinstance(line, int) else len(line)
