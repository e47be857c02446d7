"""Documents of token files: their form, the pieces of a file, and the ids of each document.

A file is never read completely: the index and the ids are read in ranges.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.columns import Columns
from forerun.data.source.files import File, unreadable
from forerun.data.source.kinds import DATATROVE_ABOUT, DATATROVE_INDEX, DATATROVE_LOSS, MEGATRON_INDEX, companion
from forerun.data.source.lines import no_rows
from forerun.data.source.rows import BadRow, FilePiece, RowError, RowPlace, SourceRow
from forerun.data.source.values import MAX_ROW_BYTES, too_large

# ---- Ranges of numbers in a file, local or remote, without reading the rest of the file ----


_TRIES = 3  # for a store that sends too few bytes


def read_numbers(file: File, dtype: np.dtype[Any], start: int, stop: int, offset_bytes: int = 0) -> NDArray[Any]:
    """Return the numbers `start` to `stop` of an array that begins at byte `offset_bytes` of the file."""
    size = dtype.itemsize
    return np.frombuffer(read_bytes(file, offset_bytes + start * size, offset_bytes + stop * size), dtype)


def read_bytes(file: File, start: int, stop: int) -> bytes:
    """Return the bytes `start` to `stop`. Raise RowError if the file ends before, and UserError if it is unreadable."""
    if stop <= start:
        return b""
    if file.store is None:
        with file.open() as stream:
            stream.seek(start)
            found = stream.read(stop - start)
        if len(found) < stop - start:
            raise disagree(file.name, f"it ends at byte {start + len(found):,}, before byte {stop:,}")
        return found
    for _ in range(_TRIES):
        try:
            found = bytes(file.store.cat_file(file.path, start=start, end=stop))
        except Exception as error:  # each driver raises its own errors
            raise unreadable(file.name, error) from error
        if len(found) == stop - start:
            return found
    raise unreadable(file.name, EOFError(f"the store sent {len(found):,} bytes instead of {stop - start:,}"))


def disagree(name: str, why: str) -> RowError:
    """Return the error for files whose sizes do not agree, because one is truncated or belongs to other data."""
    return RowError(
        "E-DATA-219",
        "the sizes of the token file and its index do not agree",
        why=f"{name}: {why}",
        fix="copy or write all files of this data again",
    )


def inconsistent(name: str, why: str) -> RowError:
    """Return the error for an index whose numbers contradict each other."""
    return RowError(
        "E-DATA-220",
        "the index of the token file is damaged",
        why=f"{name}: {why}",
        fix="copy or write all files of this data again",
    )


def missing_index(name: str) -> RowError:
    """Return the error for a token file without its index. Without it, the borders of documents are unknown."""
    return RowError(
        "E-DATA-215",
        "the index of the token file is missing",
        why=f"{name} does not exist, and it has the borders of the documents",
        fix=f"copy {name} too, or write the data again with an index",
    )


# ---- The index of Megatron's token files: NAME.idx, which belongs to NAME.bin ----
#
# The index has the magic bytes and a version, the type of the ids, the numbers of sequences and documents, then three
# arrays: the length of each sequence in tokens, its first byte, and the first sequence of each document.


_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LENGTH, _OFFSET = np.dtype("<i4"), np.dtype("<i8")
_MAX_SEQUENCES = 1 << 20  # whose lengths are in memory at a time


@dataclass(frozen=True)
class MegatronIndex:
    """The index of one file, checked against the sizes of both files."""

    file: File  # the index
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int
    mask: File | None = None  # Megatron stores no loss masks
    made_by: str = ""

    def borders(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the first token of each document from `start` to `stop`, and the end of the last one.

        Every length and pointer between them is checked. Raise RowError if they contradict each other.
        """
        marks = read_numbers(self.file, _OFFSET, start, stop + 1, self._documents_at)
        first, last = int(marks[0]), int(marks[-1])
        is_start, is_end = start == 0, stop == self.documents
        if (np.diff(marks) < 0).any() or first < 0 or last > self.sequences or (is_start and first):
            raise inconsistent(self.file.name, "the documents do not follow each other")
        if is_end and last != self.sequences:
            raise inconsistent(self.file.name, f"the documents have {last:,} of {self.sequences:,} sequences")
        if last - first > _MAX_SEQUENCES and stop - start > 1:
            middle = (start + stop) // 2
            return np.concatenate([self.borders(start, middle)[:-1], self.borders(middle, stop)])
        begins = [self._begins(at, min(at + _MAX_SEQUENCES, last)) for at in range(first, last, _MAX_SEQUENCES)]
        if not begins:  # only documents without sequences
            return np.repeat(self._begins(first, first), len(marks))
        if len(begins) > 1:  # one document
            return np.array([begins[0][0], begins[-1][-1]])
        return begins[0][marks - first]

    @property
    def _documents_at(self) -> int:
        return _HEADER.size + self.sequences * (_LENGTH.itemsize + _OFFSET.itemsize)

    def _begins(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the first token of each sequence from `first` to `last`, and the first token after them."""
        size = self.dtype.itemsize
        pointers_at = _HEADER.size + self.sequences * _LENGTH.itemsize
        lengths = read_numbers(self.file, _LENGTH, first, last, _HEADER.size).astype(np.int64)
        pointers = read_numbers(self.file, _OFFSET, first, min(last + 1, self.sequences), pointers_at)
        if last == self.sequences:
            pointers = np.append(pointers, self.tokens * size)
        if (lengths < 0).any() or (first == 0 and pointers[0] != 0) or pointers[0] % size:
            raise inconsistent(self.file.name, f"the lengths after sequence {first:,} are not possible")
        if (np.diff(pointers) != lengths * size).any() or pointers[-1] > self.tokens * size or pointers[0] < 0:
            raise inconsistent(self.file.name, f"the lengths and pointers after sequence {first:,} do not agree")
        return pointers // size


def open_megatron(file: File) -> MegatronIndex:
    """Return the index of a .bin file. Raise RowError if it is missing, unknown, or does not fit the file."""
    index = file.beside(MEGATRON_INDEX)
    if index is None:
        raise missing_index(File(companion(file.path, MEGATRON_INDEX), file.kind).name)
    size_bytes, data_bytes = index.size_bytes(), file.size_bytes()
    if size_bytes < _HEADER.size:
        raise disagree(index.name, f"it has {size_bytes:,} bytes, and its header alone has {_HEADER.size}")
    magic, version, code, sequences, marks = _HEADER.unpack(read_bytes(index, 0, _HEADER.size))
    if magic != _MAGIC or version != _VERSION:
        raise RowError(
            "E-DATA-216",
            "the index of the token file has an unknown format",
            why=f"{index.name} does not begin with MMIDIDX and version {_VERSION}",
            fix="write the data with the mmap format of Megatron (IndexedDatasetBuilder), or name other files",
        )
    dtype = _dtype(index, code)
    _require_size(index, size_bytes, sequences, marks)
    tokens = data_bytes // dtype.itemsize
    found = MegatronIndex(index, dtype, sequences, max(marks - 1, 0), tokens)
    end = 0
    if sequences:
        last = read_numbers(index, _LENGTH, sequences - 1, sequences, _HEADER.size)
        pointer = read_numbers(index, _OFFSET, sequences - 1, sequences, _HEADER.size + sequences * _LENGTH.itemsize)
        end = int(pointer[0]) + int(last[0]) * dtype.itemsize
    if end != data_bytes:
        raise disagree(file.name, f"it has {data_bytes:,} bytes, and its index describes {end:,}")
    if sequences and not found.documents:
        raise inconsistent(index.name, f"it has {sequences:,} sequences, but no document")
    return found


def _dtype(index: File, code: int) -> np.dtype[Any]:
    if code not in _MEGATRON_TYPES:
        raise RowError(
            "E-DATA-217",
            "the token file does not hold token ids",
            why=f"{index.name}: the type of its numbers has the code {code}, which is not a type of ids",
            fix="name files of token ids",
        )
    return np.dtype(_MEGATRON_TYPES[code])


def _require_size(index: File, size_bytes: int, sequences: int, marks: int) -> None:
    """Raise RowError if the size of the index is not that of its arrays."""
    expected = _HEADER.size + sequences * (_LENGTH.itemsize + _OFFSET.itemsize) + marks * _OFFSET.itemsize
    if sequences and size_bytes == expected + sequences:
        raise RowError(
            "E-DATA-218",
            "multimodal data is not supported",
            why=f"{index.name} has a mode for each sequence, so some of them are not text",
            fix="write the text with a builder that is not multimodal",
        )
    if size_bytes != expected:
        raise disagree(index.name, f"it has {size_bytes:,} bytes, and its arrays have {expected:,}")


# ---- The index of datatrove's token files: NAME.ds.index, which belongs to NAME.ds ----
#
# The index is the end of each document in tokens. NAME.ds.loss, if it exists, has one byte per token: whether it has a
# loss. NAME.ds.metadata, if it exists, has the name of the tokenizer, the bytes of an id and the number of tokens.


_END = np.dtype("<u8")
_DATATROVE_TYPES = {2: "<u2", 4: "<u4"}
_ABOUT_BYTES = 1 << 16


@dataclass(frozen=True)
class DatatroveIndex:
    """The index of one file, checked against the sizes of all its files."""

    file: File  # the index
    dtype: np.dtype[Any]
    documents: int
    tokens: int
    mask: File | None
    made_by: str  # the name of the tokenizer, or ""

    def borders(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the first token of each document from `start` to `stop`, and the end of the last one.

        Raise RowError if a document ends before it begins.
        """
        ends = read_numbers(self.file, _END, max(start - 1, 0), stop)
        if len(ends) and int(ends.max()) > self.tokens:
            raise inconsistent(self.file.name, f"a document ends after the {self.tokens:,} tokens of the file")
        found = ends.astype(np.int64)
        if start == 0:
            found = np.concatenate([np.zeros(1, np.int64), found])
        if (np.diff(found) < 0).any():
            raise inconsistent(self.file.name, "a document ends before it begins")
        return found


def open_datatrove(file: File) -> DatatroveIndex:
    """Return the index of a .ds file. Raise RowError if it is missing or does not fit the file."""
    index = file.beside(DATATROVE_INDEX)
    if index is None:
        raise missing_index(File(companion(file.path, DATATROVE_INDEX), file.kind).name)
    index_bytes, data_bytes = index.size_bytes(), file.size_bytes()
    if index_bytes % _END.itemsize:
        raise disagree(index.name, f"its {index_bytes:,} bytes are not a multiple of {_END.itemsize}")
    documents = index_bytes // _END.itemsize
    tokens = int(read_numbers(index, _END, documents - 1, documents)[0]) if documents else 0
    tokenizer, size, count = _metadata(file)
    id_bytes = data_bytes // tokens if tokens else size or 2
    if id_bytes not in _DATATROVE_TYPES or tokens * id_bytes != data_bytes:
        raise disagree(
            file.name, f"it has {data_bytes:,} bytes, and its index describes {tokens:,} ids of 2 or 4 bytes"
        )
    if (size or id_bytes) != id_bytes or (tokens if count is None else count) != tokens:
        about = (
            f"its metadata says {count:,} ids of {size} bytes" if count is not None else f"its ids have {size} bytes"
        )
        raise disagree(file.name, f"{about}, and its index describes {tokens:,} ids of {id_bytes} bytes")
    mask = file.beside(DATATROVE_LOSS)
    if mask is not None and mask.size_bytes() != tokens:
        raise disagree(mask.name, f"it has {mask.size_bytes():,} bytes for {tokens:,} tokens")
    return DatatroveIndex(index, np.dtype(_DATATROVE_TYPES[id_bytes]), documents, tokens, mask, tokenizer)


def _metadata(file: File) -> tuple[str, int | None, int | None]:
    """Return the name of the tokenizer, the bytes of an id and the number of tokens of the metadata, if they exist."""
    about = file.beside(DATATROVE_ABOUT)
    if about is None:
        return "", None, None
    raw = read_bytes(about, 0, min(about.size_bytes(), _ABOUT_BYTES))
    lines = raw.decode("utf-8", errors="replace").splitlines()
    name, _, size = (lines[0] if lines else "").rpartition("|")
    count = lines[1].strip() if len(lines) > 1 else ""
    return name, int(size) if size.isdecimal() else None, int(count) if count.isdecimal() else None


_INDEX_DOCUMENTS = 1 << 16  # whose borders are in memory at a time
_READ_BYTES = 4 << 20  # of ids that are read at a time, unless one document is larger
_NAMES = {"u1": "1-byte", "i2": "2-byte", "u2": "2-byte", "i4": "4-byte", "u4": "4-byte", "i8": "8-byte"}


TokenIndex = MegatronIndex | DatatroveIndex


def open_index(file: File) -> TokenIndex:
    """Return the index of a token file. Raise RowError if it is missing or damaged."""
    return open_megatron(file) if file.kind == "megatron" else open_datatrove(file)


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
        # datatrove writes files without tokens for empty shards, and reports that in their metadata.
        if not index.documents and not (file.kind == "datatrove" and _metadata(file)[2] == 0):
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
