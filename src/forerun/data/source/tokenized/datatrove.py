"""The index of datatrove's token files: NAME.ds.index, which belongs to NAME.ds.

The index is the end of each document in tokens. NAME.ds.loss, if it exists, has one byte per token: whether it has a
loss. NAME.ds.metadata, if it exists, has the name of the tokenizer, the bytes of an id and the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.files import File
from forerun.data.source.kinds import DATATROVE_ABOUT, DATATROVE_INDEX, DATATROVE_LOSS, companion
from forerun.data.source.tokenized.ranges import disagree, inconsistent, missing_index, read_bytes, read_numbers

_END = np.dtype("<u8")
_TYPES = {2: "<u2", 4: "<u4"}
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


def open_index(file: File) -> DatatroveIndex:
    """Return the index of a .ds file. Raise RowError if it is missing or does not fit the file."""
    index = file.beside(DATATROVE_INDEX)
    if index is None:
        raise missing_index(File(companion(file.path, DATATROVE_INDEX), file.kind).name)
    index_bytes, data_bytes = index.size_bytes(), file.size_bytes()
    if index_bytes % _END.itemsize:
        raise disagree(index.name, f"its {index_bytes:,} bytes are not a multiple of {_END.itemsize}")
    documents = index_bytes // _END.itemsize
    tokens = int(read_numbers(index, _END, documents - 1, documents)[0]) if documents else 0
    tokenizer, size, count = _about(file)
    id_bytes = data_bytes // tokens if tokens else size or 2
    if id_bytes not in _TYPES or tokens * id_bytes != data_bytes:
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
    return DatatroveIndex(index, np.dtype(_TYPES[id_bytes]), documents, tokens, mask, tokenizer)


def token_count(file: File) -> int | None:
    """Return the number of tokens that the metadata says, or None if it says none."""
    return _about(file)[2]


def _about(file: File) -> tuple[str, int | None, int | None]:
    """Return the name of the tokenizer, the bytes of an id and the number of tokens of the metadata, if they exist."""
    about = file.beside(DATATROVE_ABOUT)
    if about is None:
        return "", None, None
    raw = read_bytes(about, 0, min(about.size_bytes(), _ABOUT_BYTES))
    lines = raw.decode("utf-8", errors="replace").splitlines()
    name, _, size = (lines[0] if lines else "").rpartition("|")
    count = lines[1].strip() if len(lines) > 1 else ""
    return name, int(size) if size.isdecimal() else None, int(count) if count.isdecimal() else None
