"""Sequential writing of safetensors files. The headers are known before the first tensor is computed.

Files have temporary names until `finish` renames all of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError
from forerun.hub.documents import INDEX_NAME
from forerun.hub.safetensors import ITEM_BYTES, SINGLE_NAME
from forerun.units import Bytes

METADATA = {"format": "pt"}
PART = ".part"
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_HEADER_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Planned:
    """The name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def shards_of(tensors: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Return the tensors of each file. A file has at most `shard_bytes`, or a single larger tensor.

    Files have consecutive tensors. Within a file, tensors with larger elements come first, so that every tensor is
    aligned to its element size.
    """
    files: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not files or tensor.data_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(tensor)
        room -= tensor.data_bytes
    return [sorted(file, key=lambda tensor: -ITEM_BYTES[tensor.dtype]) for file in files]


def names_of(count: int) -> list[str]:
    """Return the names of `count` weight files."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class Shards:
    """The files of one checkpoint. Use it as a context manager: unfinished files are removed."""

    def __init__(self, folder: Path, files: Sequence[Sequence[Planned]]) -> None:
        self.folder = folder
        self._files = dict(zip(names_of(len(files)), files, strict=True))
        self._finished = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            for name in (*self._files, INDEX_NAME):
                (self.folder / (name + PART)).unlink(missing_ok=True)

    def write(self, value_of: Callable[[Planned], NDArray[Any]]) -> None:
        """Write all files. `value_of` is called for one tensor at a time and returns its array."""
        for name, tensors in self._files.items():
            try:
                self._write_file(self.folder / (name + PART), tensors, value_of)
            except OSError as error:
                raise UserError(
                    "E-WEIGHTS-009",
                    f"the weights cannot be written to {self.folder}",
                    why=f"{name}: {error.strerror or error}",
                    fix=f"free {Bytes(self._total_bytes())} of disk space there, or name a folder that can be written",
                ) from error

    def finish(self) -> list[Path]:
        """Write the index if there are several files, rename all files, and return their paths."""
        final = list(self._files)
        if len(final) > 1:
            with open(self.folder / (INDEX_NAME + PART), "wb") as file:
                file.write(self._index())
                _settle(file)
            final.append(INDEX_NAME)
        for name in final:
            os.replace(self.folder / (name + PART), self.folder / name)
        self._finished = True
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return [self.folder / name for name in final]

    def _write_file(self, path: Path, tensors: Sequence[Planned], value_of: Callable[[Planned], NDArray[Any]]) -> None:
        with open(path, "wb") as file:
            file.write(header_bytes(tensors))
            for tensor in tensors:
                _write_array(file, tensor, value_of(tensor))
            _settle(file)

    def _total_bytes(self) -> int:
        return sum(tensor.data_bytes for tensors in self._files.values() for tensor in tensors)

    def _index(self) -> bytes:
        owners = {tensor.name: name for name, tensors in self._files.items() for tensor in tensors}
        index = {"metadata": {"total_size": self._total_bytes()}, "weight_map": dict(sorted(owners.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()


def write_file(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write one file of tensors that are already in memory."""
    planned = [Planned(name, DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()]
    with open(path, "wb") as file:
        file.write(header_bytes(planned))
        for tensor in planned:
            _write_array(file, tensor, np.ascontiguousarray(arrays[tensor.name]))
        _settle(file)


def header_bytes(tensors: Sequence[Planned]) -> bytes:
    """Return the header: its length, then JSON that is padded with spaces for alignment."""
    header: dict[str, Any] = {"__metadata__": METADATA}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.data_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_array(file: BinaryIO, tensor: Planned, array: NDArray[Any]) -> None:
    if array.shape != tensor.shape or array.nbytes != tensor.data_bytes or not array.flags.c_contiguous:
        raise ValueError(f"{tensor.name} is {array.dtype}{list(array.shape)}, announced {tensor}")
    file.write(array.reshape(-1).view(np.uint8).data)


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
