"""Reading a plain text file: one document, or the documents between separators."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import BinaryIO

from forerun.data.source.columns import Unfit
from forerun.data.source.files import File
from forerun.data.source.lines import BYTE_ORDER_MARK, Damaged, blocks, damaged
from forerun.data.source.rows import Bad, Piece, Place, Row
from forerun.data.source.values import too_large

MAX_TEXT_BYTES = 1 << 30
WORD = "document"  # what places in a separated file count
ENDS_OF_LINE = "\r\n"
LIKELY_SEPARATOR = "<|endoftext|>"
_LOOKED_AT_BYTES = 1 << 18


def rows(file: File, separator: str | None = None, piece: Piece | None = None) -> Iterator[Row | Bad]:
    """Yield the documents of a file; with a separator, those that begin in the bytes of `piece`."""
    if separator is not None:
        yield from _separated(file, separator, piece or Piece(0, 0, -1))
        return
    place = Place(file.name)
    try:
        yield Row({"text": _text(file)}, place)
    except Damaged as error:
        yield damaged(error).at(file.name, whole_file=True)
    except Unfit as unfit:
        yield unfit.at(file.name)


def pieces(file: File, at: int, piece_bytes: int, separator: str | None) -> list[Piece]:
    """Return the file in parts of about `piece_bytes` if its documents can be found from the middle of it."""
    size = file.size_bytes()
    if separator is None:
        return [Piece(at, 0, size)]
    if file.packed or size < 0 or not file.seekable() or _overlaps_itself(separator):
        return [Piece(at, 0, size if file.packed else -1)]
    count = max(1, round(size / piece_bytes))
    return [Piece(at, start, stop) for start, stop in pairwise(size * part // count for part in range(count + 1))]


def before(file: File, piece: Piece, separator: str | None) -> int:
    """Return how many documents begin before the piece; this reads the file up to it."""
    if separator is None or file.packed or piece.start == 0:
        return 0
    count = begin = 0
    with file.open() as stream:
        for _, size in _between(file, stream, separator.encode()):
            if begin >= piece.start:
                break
            count, begin = count + 1, begin + size
    return count


def split_text(text: str, separator: str) -> list[str]:
    """Return the documents of a text. Ends of line around a separator and documents without text are left out."""
    found = (part.strip(ENDS_OF_LINE) for part in text.split(separator))
    return [part for part in found if part and not part.isspace()]


def likely_separators(file: File) -> int:
    """Return how often `<|endoftext|>` occurs in the beginning of a text file; 0 if it cannot be read."""
    try:
        with file.open() as stream:
            return stream.read(_LOOKED_AT_BYTES).count(LIKELY_SEPARATOR.encode())
    except Exception:  # drivers raise many kinds of errors; reading the rows reports them
        return 0


def _separated(file: File, separator: str, piece: Piece) -> Iterator[Row | Bad]:
    mark = separator.encode()
    start, stop = (0, -1) if file.packed else (piece.start, piece.stop)
    begin = max(0, start - len(mark))
    number, found = 0, False
    with file.open() as stream:
        if begin:
            stream.seek(begin)
        try:
            for held, size in _between(file, stream, mark):
                at, begin = begin, begin + size
                if at < start:  # it began in the piece before
                    continue
                if 0 <= stop <= at:
                    break
                number += 1
                try:
                    text = _decoded(held.joined(at == 0), file).strip(ENDS_OF_LINE)
                    if not text or text.isspace():
                        continue
                    yield Row({"text": text}, Place(file.name, number, WORD))
                except Unfit as unfit:
                    yield unfit.at(file.name, number, WORD)
                found = True
        except Damaged as error:
            after = "after this document" if number else ""
            yield damaged(error, after).at(file.name, number if number or start else None, WORD, whole_file=True)
            return
    if not found and start == 0 and (stop < 0 or stop >= file.size_bytes()):
        yield _no_text().at(file.name)


class _Held:
    """The bytes of one document as they are read. Beyond the limit they are only counted."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > MAX_TEXT_BYTES:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def joined(self, is_first: bool) -> bytes:
        """Return the bytes; those at the front of a file without a byte order mark."""
        if self.size > MAX_TEXT_BYTES:
            raise too_large(self.size, MAX_TEXT_BYTES)
        raw = b"".join(self._parts)
        return raw.removeprefix(BYTE_ORDER_MARK) if is_first else raw


def _between(file: File, stream: BinaryIO, mark: bytes) -> Iterator[tuple[_Held, int]]:
    """Yield what is between separators, and its size with the separator behind it.

    The end of a block that may be the beginning of a separator is carried into the next block.
    """
    held, tail = _Held(), b""
    for block in blocks(file, stream):
        *ended, rest = (tail + block).split(mark)
        for part in ended:
            held.add(part)
            yield held, held.size + len(mark)
            held = _Held()
        cut = max(0, len(rest) - len(mark) + 1)
        held.add(rest[:cut])
        tail = rest[cut:]
    held.add(tail)
    yield held, held.size


def _overlaps_itself(separator: str) -> bool:
    """Return whether two places of the separator can overlap, so that where it is found depends on the beginning."""
    mark = separator.encode()
    return any(mark.startswith(mark[n:]) for n in range(1, len(mark)))


def _text(file: File) -> str:
    held = _Held()
    with file.open() as stream:
        for block in blocks(file, stream):
            held.add(block)
    try:
        raw = held.joined(True)
    except Unfit as unfit:
        raise Unfit(
            unfit.what,
            unfit.why,
            f"split -C 64m {file.name} part-, give JSONL with a document in each line, or name what separates "
            "documents: data.separator",
        ) from None
    text = _decoded(raw, file)
    if not text or text.isspace():
        raise _no_text()
    return text


def _no_text() -> Unfit:
    return Unfit("holds no text", why="it is empty or only white space", fix="fill it or move it out of data.path")


def _decoded(raw: bytes, file: File) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unfit(
            "not UTF-8 text",
            why=f"byte {error.start} is 0x{raw[error.start]:02x}: {error.reason}",
            fix=f"if it is text: iconv -f latin1 -t utf-8 {file.name} > fixed.txt; if not, move it out of data.path",
        ) from error
