"""Several sources in one order; rows never mix sources.

Without weights all rows are one set, permuted anew in every epoch: each row exactly once. With weights the order is
made of blocks of 4096 places. In each block every part has the same, exact number of places, arranged by a
permutation keyed by (seed, block). The uses of a part are counted through: use c is row c mod n of its pass c // n,
permuted by (seed, part, pass); so no row of a part comes again before all its others have come, and any place is
found at once, however late.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.order.permutation import permuted
from forerun.data.order.rows import Arrays, Counts, Example, PackedRows
from forerun.errors import UserError

BLOCK = 4096  # places


class Beside(Protocol):
    """Further arrays of the same rows."""

    @property
    def digest(self) -> str: ...

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """By name, each [n, ...]."""


class Mixture:
    """The rows of all parts, numbered through: first those of part 0, then those of part 1, and so on.

    `names` are for messages.
    """

    def __init__(
        self,
        parts: Sequence[PackedRows],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        if not parts or len({part.sequence for part in parts}) > 1:
            raise ValueError(f"rows of {[part.sequence for part in parts]} positions cannot be mixed")
        self.parts = tuple(parts)
        self.names = tuple(names or map(str, range(len(parts))))
        self._firsts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self._places = None if weights is None else places_of(weights, self.names)
        self._beside: Beside | None = None

    def accompanied(self, beside: Beside) -> Self:
        """The same rows in the same order, with further arrays in each."""
        made = copy(self)
        made.__dict__.pop("digest", None)
        made._beside = beside
        return made

    def with_parts(self, parts: Sequence[PackedRows]) -> Mixture:
        """The same order of other rows, as many of them."""
        other = Mixture(parts, None, self.names)
        if [len(part) for part in parts] != [len(part) for part in self.parts]:
            raise ValueError("other numbers of rows")
        other._places = self._places
        return other

    def __len__(self) -> int:
        """Rows of all parts together."""
        return int(self._firsts[-1])

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @property
    def reports(self) -> dict[str, Counts]:
        """What became of the documents of each part."""
        return {name: part.report for name, part in zip(self.names, self.parts, strict=True)}

    @cached_property
    def digest(self) -> str:
        """Of the parts, of their weights, and of what stands beside the rows: the same digest, the same batches."""
        beside = f" {self._beside.digest}" if self._beside else ""
        if len(self.parts) == 1:
            return self.parts[0].digest + beside
        said = f"mixture 1 {[part.digest for part in self.parts]} {self._places}"
        return hashlib.sha256(said.encode()).hexdigest()[:12] + beside

    @property
    def epoch(self) -> int:
        """Rows of an epoch: all; with weights, as many as it takes to see the part that lasts longest once."""
        if self._places is None:
            return len(self)
        return max(-(-len(part) * BLOCK // places) for part, places in zip(self.parts, self._places, strict=True))

    @property
    def passes(self) -> list[float]:
        """How often each part is seen in an epoch."""
        if self._places is None:
            return [1.0] * len(self.parts)
        pairs = zip(self.parts, self._places, strict=True)
        return [self.epoch * places / BLOCK / len(part) for part, places in pairs]

    def drawn(self, places: ArrayLike, seed: int) -> NDArray[np.int64]:
        """The rows at these places of the endless order of `seed`."""
        at = np.asarray(places, np.int64)
        if self._places is None:
            epochs, inside = np.divmod(at, len(self))
            rows = np.empty_like(at)
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                rows[here] = permuted(inside[here], len(self), seed, epoch)
            return rows
        part, use = self._uses(at, seed)
        rows = np.empty_like(at)
        for p in np.unique(part).tolist():
            passes, inside = np.divmod(use, len(self.parts[p]))
            for number in np.unique(passes[part == p]).tolist():
                here = (part == p) & (passes == number)
                rows[here] = self._firsts[p] + permuted(inside[here], len(self.parts[p]), seed, p, number)
        return rows

    def _uses(self, at: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part at each place, and how often that part stands before it."""
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
        """Rows by their numbers, as five arrays [n, S], and what stands beside them."""
        index = np.asarray(indices, np.int64)
        return self._taken(index) | (self._beside.take(index) if self._beside else {})

    def _taken(self, index: NDArray[np.int64]) -> Arrays:
        if len(self.parts) == 1:
            return self.parts[0].take(index)
        part = self._part_of(index)
        out: Arrays = {}
        for p in np.unique(part).tolist():
            here = part == p
            for name, array in self.parts[p].take(index[here] - self._firsts[p]).items():
                out.setdefault(name, np.empty((len(index), *array.shape[1:]), array.dtype))[here] = array
        return out

    def examples(self, row: int) -> list[Example]:
        """(part, document) or (part, document, piece) of all that stand in the row."""
        p = int(self._part_of(np.array([row]))[0])
        return [(p, *example) for example in self.parts[p].examples(row - int(self._firsts[p]))]

    def _part_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return np.searchsorted(self._firsts, index, side="right") - 1


def places_of(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """Places of each part in a block: the exact shares rounded down, and the largest remainders rounded up."""
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} parts")
    for weight, name in zip(weights, names, strict=True):
        if not 0 < weight < float("inf"):
            raise UserError(
                f"data.mixture.{name}: weight {weight:g}", why="a weight is above 0", fix="leave the part out"
            )
    shares = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    places = np.floor(shares).astype(np.int64)
    order = np.argsort(-(shares - places), kind="stable")
    places[order[: BLOCK - int(places.sum())]] += 1
    for share, count, name in zip(shares, places, names, strict=True):
        if not count:
            raise UserError(
                f"data.mixture.{name}: its weight is too small to be drawn",
                why=f"its share is {share / BLOCK:.3g}, and the order is exact to 1/{BLOCK}",
                fix=f"a share of at least {1 / BLOCK:.2g}, or leave the part out",
            )
    return tuple(places.tolist())


@lru_cache(maxsize=16)
def _arrangement(places: tuple[int, ...], seed: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each place in a block: its part, and how many places of that part stand before it in the block."""
    sorted_parts = np.repeat(np.arange(len(places)), places)
    parts = sorted_parts[permuted(np.arange(BLOCK), BLOCK, seed, block, BLOCK, 0)]
    before = np.empty(BLOCK, np.int64)
    for p, count in enumerate(places):
        before[parts == p] = np.arange(count)
    return parts, before
