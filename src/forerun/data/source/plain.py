"""Reading a plain text file, which is one document."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.data.source.columns import Unfit
from forerun.data.source.files import File
from forerun.data.source.lines import BYTE_ORDER_MARK, Damaged, blocks, damaged
from forerun.data.source.rows import Bad, Place, Row
from forerun.data.source.values import too_large

MAX_TEXT_BYTES = 1 << 30


def rows(file: File) -> Iterator[Row | Bad]:
    place = Place(file.name)
    try:
        yield Row({"text": _text(file)}, place)
    except Damaged as error:
        yield damaged(error).at(file.name, whole_file=True)
    except Unfit as unfit:
        yield unfit.at(file.name)


def _text(file: File) -> str:
    held: list[bytes] = []
    size = 0
    with file.open() as stream:
        for block in blocks(file, stream):
            size += len(block)
            if size > MAX_TEXT_BYTES:
                held.clear()
            else:
                held.append(block)
    if size > MAX_TEXT_BYTES:
        unfit = too_large(size, MAX_TEXT_BYTES)
        raise Unfit(
            unfit.what, unfit.why, f"split -C 64m {file.name} part-, or give JSONL with a document in each line"
        )
    raw = b"".join(held).removeprefix(BYTE_ORDER_MARK)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Unfit(
            "not UTF-8 text",
            why=f"byte {error.start} is 0x{raw[error.start]:02x}: {error.reason}",
            fix=f"if it is text: iconv -f latin1 -t utf-8 {file.name} > fixed.txt; if not, move it out of data.path",
        ) from error
    if not text or text.isspace():
        raise Unfit("holds no text", why="it is empty or only white space", fix="fill it or move it out of data.path")
    return text
