"""A reader of GGUF files (versions 2 and 3): metadata, and tensors dequantized to float32."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32


def q4_1(blocks: NDArray[np.void]) -> Floats:
    """Weight = nibble * scale + minimum; the low nibbles are the block's first half, the high ones its second."""
    nibbles = np.concatenate([blocks["q"] & 0xF, blocks["q"] >> 4], axis=-1).astype(np.float32)
    return nibbles * blocks["scale"].astype(np.float32)[:, None] + blocks["minimum"].astype(np.float32)[:, None]


def q8_0(blocks: NDArray[np.void]) -> Floats:
    """Weight = int8 * scale."""
    return blocks["q"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


def plain(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


@dataclass(frozen=True)
class Encoding:
    """How weights of one tensor type lie in the file, `weights` to an item of `layout`."""

    layout: np.dtype[Any]
    weights: int
    decode: Callable[[NDArray[Any]], Floats]


ENCODINGS = {
    0: Encoding(np.dtype("<f4"), 1, plain),
    1: Encoding(np.dtype("<f2"), 1, plain),
    3: Encoding(np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", BLOCK // 2)]), BLOCK, q4_1),
    8: Encoding(np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]), BLOCK, q8_0),
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies. `shape` has the slowest dimension first, as numpy has it; the file has it last."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The head of a GGUF file; tensors are read when they are asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def read(self, name: str) -> Floats:
        tensor = self.tensors[name]
        encoding = ENCODINGS[tensor.kind]
        count = math.prod(tensor.shape) // encoding.weights
        blocks = np.fromfile(self.path, encoding.layout, count, offset=tensor.offset)
        return encoding.decode(blocks).reshape(tensor.shape)


def opened(path: Path) -> GgufFile:
    with path.open("rb") as file:
        magic, version, tensor_count, pair_count = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"{path.name} is no GGUF file of version 2 or 3")
        metadata = {_string(file): _value(file, _scalar(file, "I")) for _ in range(pair_count)}
        tensors = dict(_tensor(file) for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
    placed = {name: Tensor(t.shape, t.kind, start + t.offset) for name, t in tensors.items()}
    return GgufFile(path, metadata, placed)


def _tensor(file: BinaryIO) -> tuple[str, Tensor]:
    name = _string(file)
    dims = [_scalar(file, "Q") for _ in range(_scalar(file, "I"))]
    return name, Tensor(tuple(reversed(dims)), _scalar(file, "I"), _scalar(file, "Q"))


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        item, count = struct.unpack("<IQ", file.read(12))
        return [_value(file, item) for _ in range(count)]
    return _scalar(file, SCALARS[kind])
