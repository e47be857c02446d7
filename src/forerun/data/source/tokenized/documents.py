"""Documents of token files: their form, the pieces of a file, and the ids of each document.

A file is never read completely: the index and the ids are read in ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.columns import Columns
from forerun.data.source.files import File
from forerun.data.source.lines import no_rows
from forerun.data.source.rows import BadRow, FilePiece, RowError, RowPlace, SourceRow
from forerun.data.source.tokenized import datatrove, megatron
from forerun.data.source.tokenized.ranges import inconsistent, read_bytes, read_numbers
from forerun.data.source.values import MAX_ROW_BYTES, too_large

_INDEX_DOCUMENTS = 1 << 16  # whose borders are in memory at a time
_READ_BYTES = 4 << 20  # of ids that are read at a time, unless one document is larger
_NAMES = {"u1": "1-byte", "i2": "2-byte", "u2": "2-byte", "i4": "4-byte", "u4": "4-byte", "i8": "8-byte"}


class TokenIndex(Protocol):
    """The index of a token file: the borders of its documents, and the type of its ids."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def mask(self) -> File | None:
        """The file with the loss mask, one byte per token."""

    @property
    def made_by(self) -> str:
        """The name of the tokenizer that made the ids, or "" if it is not known."""

    def borders(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the first token of each document from `start` to `stop`, and the end of the last one."""


def open_index(file: File) -> TokenIndex:
    """Return the index of a token file. Raise RowError if it is missing or damaged."""
    return megatron.open_index(file) if file.kind == "megatron" else datatrove.open_index(file)


def recognise(file: File, given: Mapping[str, Any]) -> Columns | BadRow:
    """Return the form of the documents, which is input_ids, or a BadRow for the file."""
    try:
        index = open_index(file)
    except RowError as error:
        return error.at(file.name, whole_file=True)
    style = f"{_NAMES[index.dtype.str[1:]]} ids" + (f" of {index.made_by}" if index.made_by else "")
    names = ("input_ids",) if index.mask is None else ("input_ids", "loss_mask")
    return Columns("input_ids", dict(given), names, style)


def pieces(file: File, at: int, piece_bytes: int) -> list[FilePiece]:
    """Return pieces with equal numbers of documents, each of about `piece_bytes`. A damaged file is one piece."""
    try:
        index = open_index(file)
        size_bytes, documents = index.tokens * index.dtype.itemsize, index.documents
    except RowError:
        size_bytes, documents = 0, 1
    count = max(1, min(documents, -(-size_bytes // piece_bytes)))
    borders = [documents * number // count for number in range(count + 1)]
    return [FilePiece(at, start, stop) for start, stop in pairwise(borders)]


def rows(file: File, piece: FilePiece) -> Iterator[SourceRow | BadRow]:
    """Yield the documents of `piece`, numbered from 1, and a BadRow for each bad one.

    Damage ends the piece: the last value is then a BadRow with the number of the last good document.
    """
    number = 0
    try:
        index = open_index(file)
        if not index.documents and not _says_empty(file):
            raise no_rows(file)
        stop = min(piece.stop, index.documents)
        for start in range(piece.start, stop, _INDEX_DOCUMENTS):
            borders = index.borders(start, min(start + _INDEX_DOCUMENTS, stop))
            for values in _documents(file, index, borders):
                number += 1
                if isinstance(values, RowError):
                    yield values.at(file.name, number, "document")
                else:
                    yield SourceRow(values, RowPlace(file.name, number, "document"))
    except RowError as error:
        yield error.at(file.name, number or None, "document", whole_file=True)


def _documents(file: File, index: TokenIndex, borders: NDArray[np.int64]) -> Iterator[dict[str, Any] | RowError]:
    """Yield the values of the documents between `borders`, or a RowError for a document that cannot be used."""
    size = index.dtype.itemsize
    at, last = 0, len(borders) - 1
    while at < last:
        end = int(np.searchsorted(borders, borders[at] + _READ_BYTES // size, side="right")) - 1
        end = min(max(end, at + 1), last)
        start, stop = int(borders[at]), int(borders[end])
        if (stop - start) * size > MAX_ROW_BYTES:  # then it is one document
            yield too_large((stop - start) * size)
        else:
            ids = read_numbers(file, index.dtype, start, stop)
            mask = None if index.mask is None else _mask(index.mask, start, stop)
            for left, right in pairwise((borders[at : end + 1] - start).tolist()):
                if left == right:
                    yield _EMPTY
                else:
                    values = {"input_ids": ids[left:right]}
                    yield values if mask is None else {**values, "loss_mask": mask[left:right]}
        at = end


_EMPTY = RowError(
    "E-DATA-221",
    "the document holds no token ids",
    why="it ends where it begins",
    fix="write the data again without empty texts",
)


def _mask(file: File, start: int, stop: int) -> NDArray[np.uint8]:
    found = np.frombuffer(read_bytes(file, start, stop), np.uint8)
    if (found > 1).any():
        raise inconsistent(file.name, "a value is neither 0 nor 1")
    return found


def _says_empty(file: File) -> bool:
    """Return whether the metadata says that the file has no tokens. datatrove writes such files for empty shards."""
    return file.kind == "datatrove" and datatrove.token_count(file) == 0
