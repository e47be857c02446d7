"""The index of Megatron's token files: NAME.idx, which belongs to NAME.bin.

The index has the magic bytes and a version, the type of the ids, the numbers of sequences and documents, then three
arrays: the length of each sequence in tokens, its first byte, and the first sequence of each document.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.files import File
from forerun.data.source.kinds import MEGATRON_INDEX, companion
from forerun.data.source.rows import RowError
from forerun.data.source.tokenized.ranges import disagree, inconsistent, missing_index, read_bytes, read_numbers

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
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


def open_index(file: File) -> MegatronIndex:
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
    if code not in _TYPES:
        raise RowError(
            "E-DATA-217",
            "the token file does not hold token ids",
            why=f"{index.name}: the type of its numbers has the code {code}, which is not a type of ids",
            fix="name files of token ids",
        )
    return np.dtype(_TYPES[code])


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
