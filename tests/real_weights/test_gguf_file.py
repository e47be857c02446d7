"""The GGUF reader against a file that the test writes byte by byte, and plain loops over the format's definition."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from real_weights import gguf_file


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def small_file(kind: int, dims: tuple[int, ...], data: bytes) -> bytes:
    pairs = [
        string("general.alignment") + struct.pack("<II", 4, 64),
        string("words") + struct.pack("<IIQ", 9, 8, 2) + string("Ġa") + string("b"),
        string("eps") + struct.pack("<If", 6, 0.5),
    ]
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    # One alignment of other data comes first, so that an offset that is passed over is seen.
    tensor = string("weight") + shape + struct.pack("<IQ", kind, 64)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + tensor
    return head + bytes(-len(head) % 64) + b"\xff" * 64 + data


def halves(value: bytes) -> float:
    return float(struct.unpack("<e", value)[0])


def loop_q4_1(data: bytes) -> list[float]:
    values = []
    for start in range(0, len(data), 20):
        scale, minimum = halves(data[start : start + 2]), halves(data[start + 2 : start + 4])
        packed = data[start + 4 : start + 20]
        values += [(byte % 16) * scale + minimum for byte in packed]
        values += [(byte // 16) * scale + minimum for byte in packed]
    return values


def loop_q8_0(data: bytes) -> list[float]:
    values = []
    for start in range(0, len(data), 34):
        scale = halves(data[start : start + 2])
        values += [scale * q for q in struct.unpack("<32b", data[start + 2 : start + 34])]
    return values


def random_blocks(count: int, scales: int, size: int) -> bytes:
    draw = random.Random(7)
    blocks = []
    for _ in range(count):
        blocks.append(struct.pack(f"<{scales}e", *(draw.uniform(-0.1, 0.1) for _ in range(scales))))
        blocks.append(draw.randbytes(size))
    return b"".join(blocks)


@pytest.mark.parametrize(
    ("kind", "data", "loop"),
    [
        (3, random_blocks(6, 2, 16), loop_q4_1),
        (8, random_blocks(6, 1, 32), loop_q8_0),
        (0, struct.pack("<192f", *range(192)), lambda data: struct.unpack("<192f", data)),
        (1, struct.pack("<192e", *range(192)), lambda data: struct.unpack("<192e", data)),
    ],
    ids=["Q4_1", "Q8_0", "F32", "F16"],
)
def test_tensor_is_what_the_format_says(kind: int, data: bytes, loop, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file(kind, (64, 3), data))
    read = gguf_file.opened(path).read("weight")
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, np.reshape(loop(data), (3, 64)), rtol=1e-6, atol=1e-7)


def test_metadata(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file(0, (1,), bytes(4)))
    assert gguf_file.opened(path).metadata == {"general.alignment": 64, "words": ["Ġa", "b"], "eps": 0.5}


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGML" + bytes(20))
    with pytest.raises(ValueError, match="no GGUF file"):
        gguf_file.opened(path)
