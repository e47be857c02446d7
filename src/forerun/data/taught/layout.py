"""How a row of a teacher's words lies in a file: values, ids and tails one after the other, and a checksum.

S positions of K kept tokens: float16 values [S, K], ids [S, K] in the fewest bytes that hold them, float32 tails
[S, N] for N temperatures, and a CRC-32 of all that. Little-endian, as everything in a cache.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHECK_BYTES = 4
SHARD_BYTES = 64 << 20  # about: so much work is lost to a kill at most
SHARDS = 16  # at least, if there are so many rows


@dataclass(frozen=True)
class Layout:
    rows: int
    sequence: int
    top_k: int
    vocab: int
    temperatures: tuple[float, ...]

    @property
    def id_bytes(self) -> int:
        """2 up to 65,536 tokens, 3 up to 16.7 million, else 4."""
        return 2 if self.vocab <= 1 << 16 else 3 if self.vocab <= 1 << 24 else 4

    @property
    def row_bytes(self) -> int:
        kept = self.sequence * self.top_k
        return kept * (2 + self.id_bytes) + self.sequence * 4 * len(self.temperatures) + CHECK_BYTES

    @property
    def rows_per_shard(self) -> int:
        return max(1, min(SHARD_BYTES // self.row_bytes, math.ceil(self.rows / SHARDS)))

    @property
    def shards(self) -> int:
        return math.ceil(self.rows / self.rows_per_shard)

    @property
    def total_bytes(self) -> int:
        """Of all shards, exactly."""
        return self.rows * self.row_bytes

    def rows_of(self, shard: int) -> range:
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def packed(self, values: NDArray[Any], ids: NDArray[Any], tails: NDArray[Any]) -> bytes:
        """One row, from values [S, K], ids [S, K] and tails [S, N]."""
        content = b"".join(
            (
                np.ascontiguousarray(values, "<f2").tobytes(),
                np.ascontiguousarray(ids, "<u4").view(np.uint8).reshape(-1, 4)[:, : self.id_bytes].tobytes(),
                np.ascontiguousarray(tails, "<f4").tobytes(),
            )
        )
        assert len(content) + CHECK_BYTES == self.row_bytes
        return content + zlib.crc32(content).to_bytes(CHECK_BYTES, "little")

    def unpacked(self, row: bytes) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
        """Values float16 [S, K], ids int32 [S, K] and tails float32 [S, N]; None if the row is not what was written."""
        content = memoryview(row)[:-CHECK_BYTES]
        if len(row) != self.row_bytes or zlib.crc32(content) != int.from_bytes(row[-CHECK_BYTES:], "little"):
            return None
        kept = self.sequence * self.top_k
        values = np.frombuffer(content, "<f2", kept).reshape(self.sequence, self.top_k)
        narrow = np.frombuffer(content, np.uint8, kept * self.id_bytes, 2 * kept).reshape(-1, self.id_bytes)
        wide = np.zeros((kept, 4), np.uint8)
        wide[:, : self.id_bytes] = narrow
        ids = wide.view("<i4").reshape(self.sequence, self.top_k)
        tails = np.frombuffer(content, "<f4", offset=kept * (2 + self.id_bytes))
        return values, ids, tails.reshape(self.sequence, len(self.temperatures))
