"""Rows of preference pairs. A row holds several pairs, and both sides of a pair are in the same row, as two segments.

Documents 2p and 2p + 1 are the chosen and the rejected side of pair p. The array `pairs` [n, S] gives the side at each
position: k is the chosen side of the row's k-th pair, -k its rejected side, 0 is padding. A row has at most
`max_pairs(S)` pairs, so that arrays per pair have a fixed shape. A pair is never split. A pair that is longer than a
row follows the policy `too_long`. Under `keep_end`, both complete answers and at least one token of the prompt are
kept. If these alone are too long, the pair is dropped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents, Mask, Tokens
from forerun.data.order.packing import (
    VERSION,
    TooLong,
    apply_policy,
    pack,
    packing_order,
    refuse_too_long,
    resolve_policy,
    window_size,
)
from forerun.data.order.rows import Arrays, Example, RowCounts, count_loss_targets, lay_out_rows
from forerun.errors import UserError
from forerun.objectives.pairs import PAIRS, REFERENCE, ROOM, max_pairs


class Pairs:
    """Rows of pairs, packed first-fit-decreasing. The packing is computed when the object is created."""

    def __init__(self, documents: Documents, sequence: int, *, too_long: TooLong = "keep_end") -> None:
        self._documents, self.sequence = documents, sequence
        self.too_long = resolve_policy(too_long, pairs=True)
        self._begins = documents.begins(np.arange(len(documents) + 1))
        sides = np.diff(self._begins).reshape(-1, 2) - 1  # positions
        total = np.where((sides > 0).all(1), sides.sum(1), 0)
        over = np.flatnonzero(total > sequence)
        if too_long == "stop":
            refuse_too_long([total], sequence, pairs=True)
        removable = np.zeros(len(total), np.int64)
        if too_long == "keep_end":  # one token of the prompt is kept
            removable[over] = [self._shared(pair) - 1 for pair in over.tolist()]
        self._cuts, kept = apply_policy(total, sequence, too_long, sides=2, removable=removable)
        if not kept.any():
            raise UserError(
                "E-DATA-017",
                "data.path: no pair can be used for training",
                why=f"{len(total)} pairs, {len(over)} of them longer than the sequence of {sequence}",
                fix="set a longer sequence" if len(over) else "give pairs with answers",
            )
        self._pairs, self._firsts, window = _pack_pairs(kept, sequence)
        self._sides = np.where(kept[:, None] > 0, sides - self._cuts[:, None], 0)
        self.report = RowCounts(
            documents=len(total),
            tokens=documents.tokens,
            rows=len(self),
            sequence=sequence,
            positions=int(kept.sum()),
            learned=count_loss_targets(documents, (self._begins[:-1].reshape(-1, 2) + self._cuts[:, None]).ravel(),
                                    self._sides.ravel()),
            too_long=len(over),
            became=too_long,
            longest=int(total.max()),
            dropped=int((kept[over] == 0).sum()),
            truncated_tokens=int(2 * self._cuts.sum() + (total[over][kept[over] == 0] + 2).sum()),
            nothing_to_learn=int((total == 0).sum()),
        )  # fmt: skip
        identity = f"pairs {VERSION} {ROOM} {documents.digest} {sequence} {too_long} {window}"
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def examples(self, row: int) -> list[Example]:
        """Return the pairs of a row, in order."""
        return [(pair,) for pair in self._pairs[self._firsts[row] : self._firsts[row + 1]].tolist()]

    def numbers(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Return the numbers of the pairs in each row, [n, max_pairs(S)]; -1 where a row has fewer pairs."""
        index = self._checked(rows)
        first, behind = self._firsts[index], self._firsts[index + 1]
        place = first[:, None] + np.arange(max_pairs(self.sequence))
        return np.where(place < behind[:, None], self._pairs[np.minimum(place, len(self._pairs) - 1)], -1)

    def take(self, indices: ArrayLike) -> Arrays:
        index = self._checked(indices)
        numbers = self.numbers(index)
        pairs = numbers[numbers >= 0]
        each = 2 * (numbers >= 0).sum(1)
        starts = self._begins[2 * pairs[:, None] + np.arange(2)] + self._cuts[pairs, None]
        out = lay_out_rows(self._documents.read_many, each, starts.ravel(), self._sides[pairs].ravel(), self.sequence)
        segments = out["segments"]
        out[PAIRS] = ((segments + 1) // 2 * np.where(segments % 2, 1, -1)).astype(np.int32)
        return out

    def _checked(self, rows: ArrayLike) -> NDArray[np.int64]:
        index = np.asarray(rows, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return index

    def _shared(self, pair: int) -> int:
        """Return the number of tokens that both sides have in common at the start, before the answer of either."""
        begin, middle, end = self._begins[2 * pair : 2 * pair + 3].tolist()
        chosen, chosen_mask = self._documents.read(begin, middle)
        rejected, rejected_mask = self._documents.read(middle, end)
        length = min(len(chosen), len(rejected))
        differs = chosen[:length] != rejected[:length]
        for mask in (chosen_mask, rejected_mask):
            differs = differs | (np.ones(length, np.bool_) if mask is None else mask[:length])
        return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True)
class PairDocuments:
    """Pairs as documents, for counts and displays: the two sides of a pair are one document."""

    sides: Documents

    def __len__(self) -> int:
        return len(self.sides) // 2

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        return self.sides.begins(2 * np.asarray(documents, np.int64))

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        return self.sides.read(start, stop)


@dataclass(frozen=True)
class PairReferences:
    """Log-probabilities of the reference model, as an extra array of a `Mixture` of pairs.

    The digest is empty: the values follow from the pairs and the model, so they do not change the identity of the data.
    """

    parts: tuple[Pairs, ...]  # of the mixture
    values: tuple[NDArray[np.float32], ...]  # of each part [pairs, 2]
    digest = ""

    def take(self, rows: NDArray[np.int64]) -> Arrays:
        """Return the values of the pairs of each row, [n, max_pairs(S), 2]; 0 where a row has fewer pairs."""
        firsts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])])
        part_of = np.searchsorted(firsts, rows, side="right") - 1
        reference = np.zeros((len(rows), max_pairs(self.parts[0].sequence), 2), np.float32)
        for number in np.unique(part_of).tolist():
            here = part_of == number
            pairs = self.parts[number].numbers(rows[here] - firsts[number])
            reference[here] = np.where(pairs[..., None] >= 0, self.values[number][pairs], 0)
        return {REFERENCE: reference}


def _pack_pairs(kept: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the pairs in the order of the rows, the start of each row, and the packing window.

    The starts have one entry more than there are rows: the end of the last row.
    """
    # A short pair takes the space of ROOM positions, so that no row gets more than `max_pairs` pairs.
    lengths = np.where(kept > 0, np.clip(kept, min(ROOM, sequence), sequence), 0)
    count = len(lengths)
    window = window_size(count, int(lengths.sum()) + count, sequence)
    order = packing_order(np.arange(count), count)
    items, row_starts = pack(lengths[order], sequence, window)
    return order[items], np.append(row_starts.astype(np.int64), len(items)), window


def describe_too_long(report: RowCounts) -> str:
    """Return for example `3 pairs longer than a row: 2 lose the start of their prompt, 1 dropped`."""
    shorter = report.too_long - report.dropped
    texts = [f"{shorter} lose the start of their prompt"] * (shorter > 0) + [f"{report.dropped} dropped"] * (
        report.dropped > 0
    )
    return f"{report.too_long} pairs longer than a row: {', '.join(texts)}"
