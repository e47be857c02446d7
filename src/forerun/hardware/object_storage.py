"""Requests to object storage: sizes of the blocks that suit it, dated prices, and the requests of a training step."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_BYTES = 512 * 1024  # of tokens; a request of this size takes little longer than one of 4 KiB
LEAST_BLOCKS = 4096  # smaller data gets smaller blocks
LANES = (256, 4096)
BLOCKS_PER_LANE = 64  # so that the blocks in use are at most a 64th of the data, except for small data


@dataclass(frozen=True)
class BlockSizes:
    """The sizes of the order `blocks`. They depend on the data only."""

    block_rows: int  # consecutive rows that are read with one request
    lanes: int  # blocks in use at the same time

    @classmethod
    def of(cls, rows: int, row_bytes: int) -> BlockSizes:
        """Return the sizes for data of so many rows. Small data gets blocks of one row: a complete permutation."""
        block_rows = max(1, min(BLOCK_BYTES // row_bytes, rows // LEAST_BLOCKS))
        wanted = rows // block_rows // BLOCKS_PER_LANE
        least, most = LANES
        return cls(block_rows, max(least, min(most, 1 << max(0, wanted.bit_length() - 1))))
