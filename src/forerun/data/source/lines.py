"""Lines of a stream of bytes: a line that is too long is measured and never held, and damage is told from trouble."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from forerun.data.source.columns import Unfit
from forerun.data.source.files import BadZstd, File, unreadable
from forerun.data.source.values import MAX_ROW_BYTES

BLOCK_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Damaged(Exception):
    """The bytes of a file are cut short or not what its ending says."""


def lines(file: File, stream: BinaryIO, start: int = 0, stop: int = -1) -> Iterator[list[bytes | int]]:
    """The lines whose first byte is in start..stop, without their newline; of one that is too long, its size.

    They come in lists, as many as a block holds. A byte order mark at the very front is left out.
    """
    at = max(start - 1, 0)
    if at:
        stream.seek(at)
    skip = start > 0  # the line that byte start - 1 is in, or ends, belongs to the piece before
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


def newlines(file: File, stop: int) -> int:
    """How many newlines stand before byte `stop`."""
    count = 0
    with file.open() as stream:
        while stop > 0 and (block := stream.read(min(BLOCK_BYTES, stop))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


def blocks(file: File, stream: BinaryIO) -> Iterator[bytes]:
    """The stream in blocks, as far as it can be read; then Damaged, or UserError if it is the store's trouble."""
    read: Any = getattr(stream, "read1", stream.read) if file.packed else stream.read
    while True:
        try:
            block = read(BLOCK_BYTES)
        except Exception as error:  # each packer and driver has errors of its own
            raise damage(file, error) from error
        if not block:
            return
        yield block


def damage(file: File, error: Exception) -> Exception:
    """Damaged if the bytes are to blame; a UserError if reading failed, which another try may mend."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile, BadZstd)):
        return Damaged(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return unreadable(file.name, error)


def damaged(error: Exception, after: str = "") -> Unfit:
    what = f"the file is cut short or damaged {after}".rstrip()
    return Unfit(what, why=str(error), fix="fetch or write it anew")


def no_rows(file: File) -> Unfit:
    return Unfit("holds no rows", why=f"read as {file.kind} to its end", fix="fill it or move it out of data.path")


def _split(file: File, stream: BinaryIO) -> Iterator[tuple[list[bytes | int], int]]:
    """Lines that are whole, and how many bytes they have with their newlines."""
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
