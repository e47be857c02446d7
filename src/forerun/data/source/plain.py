"""Reader of plain text: a file is one document, or several documents divided by a separator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from forerun.data.source.files import File
from forerun.data.source.lines import BYTE_ORDER_MARK, CorruptFile, blocks, byte_pieces, damaged
from forerun.data.source.rows import BadRow, FilePiece, RowError, RowPlace, SourceRow
from forerun.data.source.values import too_large

MAX_TEXT_BYTES = 1 << 30
WORD = "document"  # what `RowPlace.number` counts in a file with a separator
ENDS_OF_LINE = "\r\n"
LIKELY_SEPARATOR = "<|endoftext|>"
_PROBE_BYTES = 1 << 18


def rows(file: File, separator: str | None = None, piece: FilePiece | None = None) -> Iterator[SourceRow | BadRow]:
    """Yield the documents of a file. With a separator, yield only those that begin in the byte range of `piece`."""
    if separator is not None:
        yield from _separated(file, separator, piece or FilePiece(0, 0, -1))
        return
    place = RowPlace(file.name)
    try:
        yield SourceRow({"text": _text(file)}, place)
    except CorruptFile as error:
        yield damaged(error).at(file.name, whole_file=True)
    except RowError as row_error:
        yield row_error.at(file.name)


def pieces(file: File, at: int, piece_bytes: int, separator: str | None) -> list[FilePiece]:
    """Return pieces of about `piece_bytes` each, or one piece without a separator or if it overlaps itself."""
    if separator is None:
        return [FilePiece(at, 0, file.size_bytes())]
    if _overlaps_itself(separator):
        return [FilePiece(at, 0, file.size_bytes() if file.packed else -1)]
    return byte_pieces(file, at, piece_bytes)


def before(file: File, piece: FilePiece, separator: str | None) -> int:
    """Return the number of documents that begin before the piece. This reads the file up to the piece."""
    if separator is None or file.packed or piece.start == 0:
        return 0
    count = begin = 0
    with file.open() as stream:
        for _, size in _split_stream(file, stream, separator.encode()):
            if begin >= piece.start:
                break
            count, begin = count + 1, begin + size
    return count


def split_text(text: str, separator: str) -> list[str]:
    """Return the documents of a text, without line ends around separators. Documents without text are omitted."""
    found = (part.strip(ENDS_OF_LINE) for part in text.split(separator))
    return [part for part in found if part and not part.isspace()]


def likely_separators(file: File) -> int:
    """Return how often `<|endoftext|>` occurs in the first 256 KiB of a text file, or 0 if it cannot be read."""
    try:
        with file.open() as stream:
            return stream.read(_PROBE_BYTES).count(LIKELY_SEPARATOR.encode())
    except Exception:  # drivers raise many kinds of errors; reading the rows reports them
        return 0


def _separated(file: File, separator: str, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    """Yield the documents that begin in the bytes of `piece`, numbered from 1."""
    mark = separator.encode()
    start, stop = (0, -1) if file.packed else (piece.start, piece.stop)
    # A document that begins exactly at `start` follows a separator that ends there, so read from that separator on.
    begin = max(0, start - len(mark))
    number, found = 0, False
    with file.open() as stream:
        if begin:
            stream.seek(begin)
        try:
            for held, size in _split_stream(file, stream, mark):
                at, begin = begin, begin + size
                if at < start:  # belongs to the previous piece
                    continue
                if 0 <= stop <= at:
                    break
                number += 1
                try:
                    text = _decode(held.joined(at == 0), file).strip(ENDS_OF_LINE)
                    if not text or text.isspace():
                        continue
                    yield SourceRow({"text": text}, RowPlace(file.name, number, WORD))
                except RowError as row_error:
                    yield row_error.at(file.name, number, WORD)
                found = True
        except CorruptFile as error:
            after = "after this document" if number else ""
            yield damaged(error, after).at(file.name, number if number or start else None, WORD, whole_file=True)
            return
    if not found and start == 0 and (stop < 0 or stop >= file.size_bytes()):
        yield _no_text().at(file.name)


class _DocumentBytes:
    """Bytes of one document while it is read. Above MAX_TEXT_BYTES they are dropped and only counted."""

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
        """Return the bytes, without a byte order mark if they are the first of the file.

        Raise RowError if the document is larger than MAX_TEXT_BYTES.
        """
        if self.size > MAX_TEXT_BYTES:
            raise too_large(self.size, MAX_TEXT_BYTES)
        raw = b"".join(self._parts)
        return raw.removeprefix(BYTE_ORDER_MARK) if is_first else raw


def _split_stream(file: File, stream: BinaryIO, mark: bytes) -> Iterator[tuple[_DocumentBytes, int]]:
    """Yield each document and its size in bytes, including the separator after it.

    A block may end in the middle of a separator, so its last bytes are carried into the next block.
    """
    held, tail = _DocumentBytes(), b""
    for block in blocks(file, stream):
        *ended, rest = (tail + block).split(mark)
        for part in ended:
            held.add(part)
            yield held, held.size + len(mark)
            held = _DocumentBytes()
        cut = max(0, len(rest) - len(mark) + 1)
        held.add(rest[:cut])
        tail = rest[cut:]
    held.add(tail)
    yield held, held.size


def _overlaps_itself(separator: str) -> bool:
    """Return whether two occurrences of the separator can overlap.

    If they can, the documents that are found depend on the byte at which reading starts.
    """
    mark = separator.encode()
    return any(mark.startswith(mark[n:]) for n in range(1, len(mark)))


def _text(file: File) -> str:
    """Return the text of a file that is one document. Raise RowError if it is too large, empty or not UTF-8."""
    held = _DocumentBytes()
    with file.open() as stream:
        for block in blocks(file, stream):
            held.add(block)
    try:
        raw = held.joined(True)
    except RowError as row_error:
        raise RowError(
            row_error.problem.code,
            row_error.problem.what,
            why=row_error.problem.why,
            fix=f"split it (split -C 64m {file.name} part-), use JSONL with one document per line, or set "
            "data.separator to the text between documents",
        ) from None
    text = _decode(raw, file)
    if not text or text.isspace():
        raise _no_text()
    return text


def _no_text() -> RowError:
    return RowError(
        "E-DATA-046",
        "holds no text",
        why="it is empty or has only white space",
        fix="add text, or move the file out of data.path",
    )


def _decode(raw: bytes, file: File) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RowError(
            "E-DATA-047",
            "not UTF-8 text",
            why=f"byte {error.start} is 0x{raw[error.start]:02x}: {error.reason}",
            fix=f"if it is text: iconv -f latin1 -t utf-8 {file.name} > fixed.txt; if not, move it out of data.path",
        ) from error
