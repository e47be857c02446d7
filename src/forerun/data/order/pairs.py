"""Preference pairs in rows: both sides of a pair stand in one row, each a segment of its own, several pairs to a row.

Documents 2p and 2p + 1 are the chosen and the rejected side of pair p. The array `pairs` [n, S] says whose a position
is: k is the chosen side of the row's k-th pair, -k its rejected side, 0 is padding. A row has `most_pairs(S)` pairs at
most, so that what is counted per pair has one shape. A pair is never split. One that is longer than a row follows
`too_long`:

- keep_end: both sides lose as many tokens at the start of the prompt that they share. All of both answers and at least
  one token of the prompt stay; where these alone are too long, the pair is left out.
- drop: it is left out. stop: an error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forerun.data.documents import Documents, InMemory, Mask, Tokens
from forerun.data.order.laid import laid
from forerun.data.order.permutation import permuted
from forerun.data.order.plan import KEY, VERSION, learned_targets, planned
from forerun.data.order.rows import Arrays, Counts, Example
from forerun.errors import UserError
from forerun.objectives.pairs import PAIRS, REFERENCE, ROOM, most_pairs

TooLong: TypeAlias = Literal["keep_end", "drop", "stop"]


class Pairs:
    """Rows of pairs, packed first-fit-decreasing. The plan is made when they are opened."""

    def __init__(self, documents: Documents, sequence: int, *, too_long: TooLong = "keep_end") -> None:
        self._documents, self.sequence, self.too_long = documents, sequence, too_long
        self._begins = documents.begins(np.arange(len(documents) + 1))
        sides = np.diff(self._begins).reshape(-1, 2) - 1  # positions
        total = np.where((sides > 0).all(1), sides.sum(1), 0)
        over = np.flatnonzero(total > sequence)
        if len(over) and too_long == "stop":
            raise _stopped(len(over), len(total), int(total.max()), sequence)
        self._cuts = np.zeros(len(total), np.int64)  # tokens at the start of both sides
        kept = total.copy()
        for pair in over.tolist():
            cut = -(-(int(total[pair]) - sequence) // 2)
            fits = too_long == "keep_end" and cut < self._shared(pair)
            self._cuts[pair], kept[pair] = (cut, total[pair] - 2 * cut) if fits else (0, 0)
        if not kept.any():
            raise UserError(
                "data.path: no pair to learn from",
                why=f"{len(total)} pairs, {len(over)} of them longer than the sequence of {sequence}",
                fix="a longer sequence" if len(over) else "give pairs with answers",
            )
        self._pairs, self._firsts, window = _rows_of(kept, sequence)
        self._sides = np.where(kept[:, None] > 0, sides - self._cuts[:, None], 0)
        self.report = Counts(
            documents=len(total),
            tokens=documents.tokens,
            rows=len(self),
            sequence=sequence,
            positions=int(kept.sum()),
            learned=learned_targets(documents, (self._begins[:-1].reshape(-1, 2) + self._cuts[:, None]).ravel(),
                                    self._sides.ravel()),
            too_long=len(over),
            became=too_long,
            longest=int(total.max()),
            dropped=int((kept[over] == 0).sum()),
            truncated_tokens=int(2 * self._cuts.sum() + (total[over][kept[over] == 0] + 2).sum()),
            nothing_to_learn=int((total == 0).sum()),
        )  # fmt: skip
        said = f"pairs {VERSION} {ROOM} {documents.digest} {sequence} {too_long} {window}"
        self.digest = hashlib.sha256(said.encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def examples(self, row: int) -> list[Example]:
        """The pairs of a row, in order."""
        return [(pair,) for pair in self._pairs[self._firsts[row] : self._firsts[row + 1]].tolist()]

    def numbers(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Which pairs stand in the rows, [n, most_pairs(S)]; -1: none."""
        index = self._checked(rows)
        first, behind = self._firsts[index], self._firsts[index + 1]
        place = first[:, None] + np.arange(most_pairs(self.sequence))
        return np.where(place < behind[:, None], self._pairs[np.minimum(place, len(self._pairs) - 1)], -1)

    def take(self, indices: ArrayLike) -> Arrays:
        index = self._checked(indices)
        numbers = self.numbers(index)
        pairs = numbers[numbers >= 0]
        each = 2 * (numbers >= 0).sum(1)
        starts = self._begins[2 * pairs[:, None] + np.arange(2)] + self._cuts[pairs, None]
        out = laid(self._documents.read, each, starts.ravel(), self._sides[pairs].ravel(), self.sequence)
        segments = out["segments"]
        out[PAIRS] = ((segments + 1) // 2 * np.where(segments % 2, 1, -1)).astype(np.int32)
        return out

    def _checked(self, rows: ArrayLike) -> NDArray[np.int64]:
        index = np.asarray(rows, np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"row {index.min()} .. {index.max()} of {len(self)}")
        return index

    def _shared(self, pair: int) -> int:
        """Tokens that both sides begin with, before either's answer."""
        begin, middle, end = self._begins[2 * pair : 2 * pair + 3].tolist()
        (one, mine), (other, yours) = self._documents.read(begin, middle), self._documents.read(middle, end)
        some = min(len(one), len(other))
        differs = one[:some] != other[:some]
        for mask in (mine, yours):
            differs = differs | (np.ones(some, np.bool_) if mask is None else mask[:some])
        return int(differs.argmax()) if differs.any() else some


@dataclass(frozen=True)
class Together:
    """The two sides of each pair as one document, for whoever counts and looks."""

    sides: Documents

    def __len__(self) -> int:
        return len(self.sides) // 2

    @property
    def tokens(self) -> int:
        return self.sides.tokens

    @property
    def largest(self) -> int:
        return self.sides.largest

    @property
    def digest(self) -> str:
        return self.sides.digest

    @property
    def masked(self) -> bool:
        return self.sides.masked

    def begins(self, documents: ArrayLike) -> NDArray[np.int64]:
        return self.sides.begins(2 * np.asarray(documents, np.int64))

    def holding(self, addresses: ArrayLike) -> NDArray[np.int64]:
        return self.sides.holding(addresses) // 2

    def read(self, start: int, stop: int) -> tuple[Tokens, Mask | None]:
        return self.sides.read(start, stop)


@dataclass(frozen=True)
class Referenced:
    """Pairs with two numbers of their own each: log-probabilities of the reference model, [pairs, 2]."""

    pairs: Pairs
    said: NDArray[np.float32]

    @property
    def sequence(self) -> int:
        return self.pairs.sequence

    @property
    def digest(self) -> str:
        return self.pairs.digest

    @property
    def report(self) -> Counts:
        return self.pairs.report

    def __len__(self) -> int:
        return len(self.pairs)

    def examples(self, row: int) -> list[Example]:
        return self.pairs.examples(row)

    def take(self, indices: ArrayLike) -> Arrays:
        numbers = self.pairs.numbers(indices)
        reference = np.where(numbers[..., None] >= 0, self.said[numbers], 0).astype(np.float32)
        return self.pairs.take(indices) | {REFERENCE: reference}


def _rows_of(kept: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The pairs row after row, where each row begins among them, and the packer's window."""
    room = np.where(kept > 0, np.clip(kept, min(ROOM, sequence), sequence), 0)
    offsets = np.concatenate([[0], np.cumsum(room + 1)]).astype(np.int64)
    plan = planned(_Sized(np.zeros(0, np.int32), offsets), sequence, "split", None)
    first_row, first_item, _ = plan.windows
    rows = np.arange(int(first_row[-1]))
    window = np.searchsorted(first_row, rows, side="right") - 1
    firsts = np.append(plan.starts_at(rows) + first_item[window], first_item[-1])
    of = np.repeat(np.arange(len(first_item) - 1), np.diff(first_item))
    pairs = permuted(of * plan.window + plan.items_at(np.arange(int(first_item[-1]))), len(kept), KEY)
    return pairs, firsts, plan.window


class _Sized(InMemory):
    """Documents of these lengths, of which nothing is ever read."""

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])


def short_of(report: Counts) -> str:
    """`3 pairs longer than a row: 2 begin later in their prompt, 1 left out`."""
    shorter = report.too_long - report.dropped
    said = [f"{shorter} begin later in their prompt"] * (shorter > 0) + [f"{report.dropped} left out"] * (
        report.dropped > 0
    )
    return f"{report.too_long} pairs longer than a row: {', '.join(said)}"


def _stopped(many: int, of: int, longest: int, sequence: int) -> UserError:
    return UserError(
        f"{many} of {of} pairs {'is' if many == 1 else 'are'} longer than the sequence",
        why=f"a row holds both sides: sequence is {sequence}, the longest pair takes {longest}; data.too_long is stop",
        fix=f"data.too_long=keep_end or drop; sequence={longest} would hold the longest",
    )
