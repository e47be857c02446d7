"""The binary format of cached teacher logits: values, ids and tails of a row, and a checksum.

A row has S positions with K kept tokens each. Its parts follow each other in this order:

- float16 values [S, K]: logits relative to the highest one
- ids [S, K], in the fewest bytes that hold them
- float32 tails [S, N]: the mass of all other tokens at each of N temperatures
- a CRC-32 of these bytes

All numbers are little-endian.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHECK_BYTES = 4
SHARD_BYTES = 64 << 20  # limit of a shard (at least one row); a killed process loses at most one shard of work
SHARDS = 16  # minimum number of shards, if there are that many rows


@dataclass(frozen=True)
class Layout:
    """The sizes of a cache, and the encoding of its rows."""

    rows: int
    sequence: int
    top_k: int  # kept tokens of each position
    vocab: int
    temperatures: tuple[float, ...]  # of the tails

    @property
    def id_bytes(self) -> int:
        """Bytes of a token id: 2 for up to 65,536 tokens, 3 for up to 16.7 million, else 4."""
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
        """Exact size of all shards."""
        return self.rows * self.row_bytes

    def rows_of(self, shard: int) -> range:
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.rows))

    def packed(self, values: NDArray[Any], ids: NDArray[Any], tails: NDArray[Any]) -> bytes:
        """Return the bytes of a row, from values [S, K], ids [S, K] and tails [S, N]."""
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
        """Return float16 values [S, K], int32 ids [S, K] and float32 tails [S, N]; None if the row is damaged."""
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
