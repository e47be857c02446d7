"""The order `blocks`: rows that lie next to each other in the data are read by one host, with one request.

Rows are grouped in blocks of `block_rows` consecutive rows. In each epoch:

1. The blocks follow each other in a keyed permutation. The rows that do not fill a block, at the end of each part,
   follow as the last blocks. This sequence of all rows is rotated by a keyed shift, so that its end differs.
2. The sequence is cut into `lanes` equal pieces. Place p of the epoch takes the next row of lane p mod lanes.
   Neighbours in a batch are therefore rows of different blocks.
3. Inside a lane, the rows of a block are in a keyed permutation. The lanes begin at different places of their first
   blocks, so that they do not all need a new block at the same time.

The order is a bijection of 0 .. rows - 1 for any number of rows, and the row at a place is computed directly. It
depends on the key and on the data, and neither on the batch nor on the number of hosts. A host that holds fixed slots
of a batch meets the same lanes in every batch if the batch and the number of lanes are powers of two, so it reads
only the blocks of its own lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.order.permutation import keyed_number, permuted, permuted_within
from forerun.hardware.object_storage import BlockSizes

NAME = "blocks-1"  # changes with every change of the order: a run is never resumed in another one
SHIFT, BLOCKS, INSIDE = 1, 2, 3  # last number of a key: what the permutation is for


@dataclass(frozen=True)
class BlockOrder:
    """The order of an epoch.

    Rows are numbered from part to part. A block never contains rows of two parts, because the parts lie in different
    files.
    """

    parts: tuple[int, ...]  # rows of each part
    sizes: BlockSizes

    @classmethod
    def of(cls, parts: Sequence[int], row_bytes: int) -> BlockOrder:
        """Return the order for parts with these numbers of rows, whose tokens have `row_bytes` bytes per row."""
        return cls(tuple(parts), BlockSizes.of(sum(parts), row_bytes))

    @property
    def name(self) -> str:
        """The name of the order with its sizes, for the identity of a run."""
        return f"{NAME}/{self.sizes.block_rows}/{self.sizes.lanes}"

    @property
    def rows(self) -> int:
        return sum(self.parts)

    def rows_at(self, places: ArrayLike, *key: int) -> NDArray[np.int64]:
        """Return the rows at these places of the epoch that `key` selects."""
        at = np.asarray(places, np.int64)
        if at.size and not (at.min() >= 0 and at.max() < self.rows):
            raise IndexError(f"place {at.min()} .. {at.max()} of {self.rows}")
        shift = keyed_number(self.rows, *key, SHIFT)
        sequence, lane, first, length = self._in_lanes(at, shift)
        # The part of a block that belongs to the lane, relative to the place in the rotated sequence.
        rotated = (first + sequence + shift) % self.rows
        block, inside = np.divmod(rotated, self.sizes.block_rows)
        size = np.minimum(self.sizes.block_rows, self.rows - block * self.sizes.block_rows)
        low = np.maximum(0, inside - sequence)
        high = np.minimum(size, inside + length - sequence)
        number = block * self.sizes.lanes + lane
        row_in_block = low + permuted_within(inside - low, high - low, number, *key, INSIDE)
        return self._rows_of(block, row_in_block, key)

    def _in_lanes(
        self, at: NDArray[np.int64], shift: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return for each place: its number in its lane, the lane, and the lane's first place and length."""
        sizes = self.sizes
        each, more = divmod(self.rows, sizes.lanes)  # the first `more` lanes have one row more
        time, lane = np.divmod(at, sizes.lanes)
        first = lane * each + np.minimum(lane, more)
        length = each + (lane < more)
        # Lane l starts at row l * block_rows / lanes of a block.
        ahead = (lane * sizes.block_rows // sizes.lanes - first - shift) % sizes.block_rows
        return (time + ahead) % length, lane, first, length

    def _rows_of(self, block: NDArray[np.int64], inside: NDArray[np.int64], key: tuple[int, ...]) -> NDArray[np.int64]:
        """Return the number of a row from its block in the sequence and its place in the block."""
        rows = self.sizes.block_rows
        firsts, full_blocks, rests = self._borders
        full = int(full_blocks[-1])
        is_full = block < full
        found = np.empty_like(block)
        number = permuted(block[is_full], full, *key, BLOCKS)
        part = np.searchsorted(full_blocks, number, side="right") - 1
        found[is_full] = firsts[part] + (number - full_blocks[part]) * rows + inside[is_full]
        rest = (block[~is_full] - full) * rows + inside[~is_full]
        part = np.searchsorted(rests, rest, side="right") - 1
        found[~is_full] = firsts[part + 1] - (rests[part + 1] - rests[part]) + rest - rests[part]
        return found

    @cached_property
    def _borders(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Borders between the parts, counted in rows, in full blocks, and in rows that fill no block."""
        counts = np.asarray(self.parts, np.int64)
        full, rest = np.divmod(counts, self.sizes.block_rows)
        firsts, full_blocks, rests = (np.concatenate([[0], np.cumsum(values)]) for values in (counts, full, rest))
        return firsts, full_blocks, rests
