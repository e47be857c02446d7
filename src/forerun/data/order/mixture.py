"""Mixtures of several sources (parts) in one endless order. A row never mixes sources.

Without weights, all rows are one set. Each epoch is another permutation of it, so each row occurs once per epoch.

With weights, the order consists of blocks of 4096 places. Each part has an exact number of places, the same in every
block, arranged by a permutation with the key (seed, block). The uses of a part are counted over all blocks. Use c of a
part with n rows is row c mod n of pass c // n, permuted by (seed, part, pass). A row is therefore not repeated before
all other rows of its part were used.

The permutations are those of `permuted`, or with `row_bytes` those of the order `blocks` (`BlockOrder`).

The row at any place is computed directly, without the places before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.order.permutation import ORDER, BlockOrder, permuted
from forerun.data.order.rows import Arrays, Example, PackedRows
from forerun.errors import UserError

BLOCK = 4096  # places


class ExtraArrays(Protocol):
    """Additional arrays for the rows of a mixture, such as cached teacher logits."""

    @property
    def digest(self) -> str:
        """Digest of the values; empty if they are not part of the identity of the data."""

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """Return the arrays of these rows by name, each [n, ...]."""


class Mixture:
    """The rows of all parts in one order. They are numbered from part to part: first those of part 0, and so on.

    Args:
      parts: the packed rows of each part, all with the same sequence length.
      weights: relative frequency of each part's rows; None: each row occurs once per epoch.
      names: names of the parts, for errors.
      row_bytes: bytes of a row's tokens in the store, for the order `blocks`; None: the order `rows`.
    """

    def __init__(
        self,
        parts: Sequence[PackedRows],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        *,
        row_bytes: int | None = None,
    ) -> None:
        if not parts or len({part.sequence for part in parts}) > 1:
            raise ValueError(f"rows of {[part.sequence for part in parts]} positions cannot be mixed")
        self.parts = tuple(parts)
        self._firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self._places = None if weights is None else places_of(weights, names or [*map(str, range(len(parts)))])
        # Without weights, one order for all rows; with weights, one for each part. Empty: the order `rows`.
        sets = [[len(part) for part in parts]] if weights is None else [[len(part)] for part in parts]
        self.block_orders = [] if row_bytes is None else [BlockOrder.of(one, row_bytes) for one in sets]
        self.extra: ExtraArrays | None = None

    def with_extra(self, extra: ExtraArrays) -> Self:
        """Return a copy with the same rows in the same order, and additional arrays."""
        mixture = copy(self)
        mixture.__dict__.pop("digest", None)
        mixture.extra = extra
        return mixture

    def __len__(self) -> int:
        """Return the number of rows of all parts."""
        return int(self._firsts[-1])

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @cached_property
    def digest(self) -> str:
        """Digest of the parts, their weights and the extra arrays. The same digest and order give equal batches."""
        extra = f" {self.extra.digest}" if self.extra and self.extra.digest else ""
        if len(self.parts) == 1:
            return self.parts[0].digest + extra
        identity = f"mixture 1 {[part.digest for part in self.parts]} {self._places}"
        return hashlib.sha256(identity.encode()).hexdigest()[:12] + extra

    @property
    def order(self) -> str:
        """The name of the order with its sizes, which a run records: it is never resumed in another order."""
        return " ".join([ORDER, *(order.name for order in self.block_orders)])

    def block_rows(self, part: int) -> int:
        """Return how many neighbouring rows of a part are a block of the order `blocks`; 1 in the order `rows`."""
        if not self.block_orders:
            return 1
        return self.block_orders[0 if self._places is None else part].sizes.block_rows

    @property
    def epoch(self) -> int:
        """Number of rows in an epoch: all rows. With weights, as many as are drawn until every part is used up once."""
        if self._places is None:
            return len(self)
        return max(-(-len(part) * BLOCK // places) for part, places in zip(self.parts, self._places, strict=True))

    @property
    def passes(self) -> list[float]:
        """How often each part is used in an epoch."""
        if self._places is None:
            return [1.0] * len(self.parts)
        epoch, parts = self.epoch, zip(self.parts, self._places, strict=True)
        return [epoch * places / BLOCK / len(part) for part, places in parts]

    def drawn(self, places: ArrayLike, seed: int) -> NDArray[np.int64]:
        """Return the row numbers at these places of the endless order of `seed`."""
        at = np.asarray(places, np.int64)
        if self._places is None:
            epochs, inside = np.divmod(at, len(self))
            rows = np.empty_like(at)
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                rows[here] = self._permuted(inside[here], 0, len(self), seed, epoch)
            return rows
        part, use = self._uses(at, seed)
        rows = np.empty_like(at)
        for p in np.unique(part).tolist():
            passes, inside = np.divmod(use, len(self.parts[p]))
            for number in np.unique(passes[part == p]).tolist():
                here = (part == p) & (passes == number)
                rows[here] = self._firsts[p] + self._permuted(inside[here], p, len(self.parts[p]), seed, p, number)
        return rows

    def _permuted(self, inside: NDArray[np.int64], order: int, size: int, *key: int) -> NDArray[np.int64]:
        if self.block_orders:
            return self.block_orders[order].rows_at(inside, *key)
        return permuted(inside, size, *key)

    def _uses(self, at: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the part at each place, and how often this part occurs before it."""
        assert self._places is not None
        blocks, inside = np.divmod(at, BLOCK)
        part, use = np.empty_like(at), np.empty_like(at)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            parts, before = _arrangement(self._places, seed, block)
            part[here] = parts[inside[here]]
            use[here] = block * np.asarray(self._places)[part[here]] + before[inside[here]]
        return part, use

    def take(self, indices: ArrayLike) -> Arrays:
        """Return rows by their numbers, as five arrays [n, S], and the extra arrays."""
        index = np.asarray(indices, np.int64)
        extra = self.extra.take(index) if self.extra else {}
        if len(self.parts) == 1:
            return self.parts[0].take(index) | extra
        part = self._part_of(index)
        out: Arrays = {}
        for p in np.unique(part).tolist():
            here = part == p
            for name, array in self.parts[p].take(index[here] - self._firsts[p]).items():
                out.setdefault(name, np.empty((len(index), *array.shape[1:]), array.dtype))[here] = array
        return out | extra

    def examples(self, row: int) -> list[Example]:
        """Return the examples of a row: (part, document) or (part, document, piece)."""
        p = int(self._part_of(np.array([row]))[0])
        return [(p, *example) for example in self.parts[p].examples(row - int(self._firsts[p]))]

    def _part_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return np.searchsorted(self._firsts, index, side="right") - 1


def places_of(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of places of each part in a block, by the largest remainder method.

    Shares are rounded down, and those with the largest remainders are rounded up until the block is full.

    Raises:
      UserError: a weight is not positive, or too small for one place.
    """
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} parts")
    for weight, name in zip(weights, names, strict=True):
        if not 0 < weight < float("inf"):
            raise UserError(
                "E-DATA-015",
                f"data.mixture.{name}: weight {weight:g}",
                why="a weight must be above 0",
                fix="set a positive weight, or remove the part",
            )
    shares = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    places = np.floor(shares).astype(np.int64)
    order = np.argsort(-(shares - places), kind="stable")
    places[order[: BLOCK - int(places.sum())]] += 1
    for share, count, name in zip(shares, places, names, strict=True):
        if not count:
            raise UserError(
                "E-DATA-016",
                f"data.mixture.{name}: its weight is too small",
                why=f"its share is {share / BLOCK:.3g}, and the smallest possible share is 1/{BLOCK}",
                fix=f"set a share of at least {1 / BLOCK:.2g}, or remove the part",
            )
    return tuple(places.tolist())


@lru_cache(maxsize=16)
def _arrangement(places: tuple[int, ...], seed: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the part at each place of a block, and how often this part occurs before it in the block."""
    sorted_parts = np.repeat(np.arange(len(places)), places)
    parts = sorted_parts[permuted(np.arange(BLOCK), BLOCK, seed, block, BLOCK, 0)]
    before = np.empty(BLOCK, np.int64)
    for p, count in enumerate(places):
        before[parts == p] = np.arange(count)
    return parts, before
