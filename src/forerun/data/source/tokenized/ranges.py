"""Ranges of numbers in a file, local or remote, without reading the rest of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.data.source.files import File, unreadable
from forerun.data.source.rows import RowError

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
