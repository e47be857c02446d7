"""Keyed permutations that are computed place by place, without a table: the orders of rows.

A Feistel network over an even number of bits is a permutation of 0 .. 4^n - 1. A result that is not below the size is
sent through the network again until it is (cycle walking; at most three more passes on average). The result is a
permutation of 0 .. size-1. The network has eight rounds of a strong mixing function. Unlike a linear congruence, it
does not keep neighbours together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.hardware.object_storage import BlockSizes

ROUNDS = 8
BLOCK = 1 << 14  # places that are computed together; their arrays fit in a core's cache
ORDER = f"feistel-{ROUNDS}"  # name of this order in a checkpoint's record: a run is never resumed in another order


def permuted(places: ArrayLike, size: int, *key: int) -> NDArray[np.int64]:
    """Return the number that the permutation assigns to each place.

    The same key gives the same permutation in every release.

    Args:
      places: numbers from 0 to size - 1.
      size: size of the permutation.
      key: integers that select the permutation, such as seed and epoch.

    Raises:
      IndexError: a place is outside the size.
    """
    at = np.asarray(places, np.int64)
    if at.size and not (at.min() >= 0 and at.max() < size):
        raise IndexError(f"place {at.min()} .. {at.max()} of {size}")
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = _round_keys(key)
    found = at.astype(np.uint64)
    flat = found.reshape(-1)
    for begin in range(0, flat.size, BLOCK):
        flat[begin : begin + BLOCK] = _cycle_walk(flat[begin : begin + BLOCK], size, half, keys)
    return found.astype(np.int64)


def permuted_within(
    places: NDArray[np.int64], sizes: NDArray[np.int64], numbers: NDArray[np.int64], *key: int
) -> NDArray[np.int64]:
    """Return the number that a permutation assigns to each place, where every place has a permutation of its own.

    The permutation of place i has the size `sizes[i]` and is selected by `key` and `numbers[i]`. Many small
    permutations are computed together, which is much faster than one call of `permuted` for each.

    Args:
      places: numbers from 0 to sizes - 1.
      sizes: sizes of the permutations.
      numbers: numbers that are not negative and select the permutations.
      key: integers that select all of them, such as seed and epoch.
    """
    with np.errstate(over="ignore"):
        tweaks = _mix((numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    halves = np.maximum(1, (_bit_lengths(sizes - 1) + 1) // 2).astype(np.uint64)
    limits = sizes.astype(np.uint64)
    keys = _round_keys(key)[:, None]
    found = _once(places.astype(np.uint64), halves, keys ^ tweaks)
    while len(outside := np.flatnonzero(found >= limits)):
        found[outside] = _once(found[outside], halves[outside], keys ^ tweaks[outside])
    return found.astype(np.int64)


def keyed_number(size: int, *key: int) -> int:
    """Return a number from 0 to size - 1 that the key selects."""
    return int(_round_keys(key)[0]) % size


def _cycle_walk(values: NDArray[np.uint64], size: int, half: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the results of the network, which is repeated for those outside the size (cycle walking)."""
    found = _once(values, half, keys)
    while (outside := found >= size).any():
        found[outside] = _once(found[outside], half, keys)
    return found


def _once(
    values: NDArray[np.uint64], half: np.uint64 | NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return the results of one pass through the Feistel network. `half` is half its number of bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64, in which every bit of the input affects every bit of the output."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, ...]) -> NDArray[np.uint64]:
    text = ",".join(map(str, key)).encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=8 * ROUNDS).digest(), "<u8").astype(np.uint64)


def _bit_lengths(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of bits of each value, as `int.bit_length` does. Values are below 2^53."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


# ---- The order `blocks`: rows that lie next to each other in the data are read by one host, with one request ----
#
# Rows are grouped in blocks of `block_rows` consecutive rows. In each epoch:
#
# 1. The blocks follow each other in a keyed permutation. The rows that do not fill a block, at the end of each part,
#    follow as the last blocks. This sequence of all rows is rotated by a keyed shift, so that its end differs.
# 2. The sequence is cut into `lanes` equal pieces. Place p of the epoch takes the next row of lane p mod lanes.
#    Neighbours in a batch are therefore rows of different blocks.
# 3. Inside a lane, the rows of a block are in a keyed permutation. The lanes begin at different places of their first
#    blocks, so that they do not all need a new block at the same time.
#
# The order is a bijection of 0 .. rows - 1 for any number of rows, and the row at a place is computed directly. It
# depends on the key and on the data, and neither on the batch nor on the number of hosts. A host that holds fixed slots
# of a batch meets the same lanes in every batch if the batch and the number of lanes are powers of two, so it reads
# only the blocks of its own lanes.


BLOCK_ORDER_NAME = "blocks-1"  # changes with every change of the order: a run is never resumed in another one
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
        return f"{BLOCK_ORDER_NAME}/{self.sizes.block_rows}/{self.sizes.lanes}"

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
