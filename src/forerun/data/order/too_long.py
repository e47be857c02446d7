"""The policy for documents and pairs that are longer than a row (`data.too_long`).

- split: all positions are kept. The packer cuts the document into full rows and a shorter rest.
- keep_start, keep_end: the first or the last positions are kept. A pair keeps its end: both sides lose the same number
  of tokens at the start of the prompt that they share.
- drop: the document or the pair is omitted.
- stop: a document or pair that is too long is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.errors import UserError

TooLong: TypeAlias = Literal["split", "keep_start", "keep_end", "drop", "stop"]


def resolve_policy(setting: TooLong | Literal["auto"], *, pairs: bool) -> TooLong:
    """Return the policy that `data.too_long` selects; raise UserError if pairs cannot follow it."""
    if setting == "auto":
        return "keep_end" if pairs else "split"
    if pairs and setting in ("split", "keep_start"):
        how = "split" if setting == "split" else "cut at its end"
        raise UserError(
            "E-DATA-008",
            f"data.too_long={setting}: a pair cannot be {how}",
            why="both answers must be complete and in one row to be compared",
            fix="data.too_long=keep_end (the default: the shared prompt loses its start), drop or stop",
        )
    return setting


def apply_policy(
    lengths: NDArray[np.int64],
    capacity: int,
    policy: TooLong,
    *,
    sides: int = 1,
    removable: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many tokens each item loses at the start of each side, and how many positions it keeps.

    An item that is dropped keeps 0 positions and loses 0 tokens at its start. Under `stop` no item may be longer than
    `capacity`: call `refuse_too_long` first.

    Args:
      lengths: positions of each item, all sides together.
      capacity: positions of a row.
      policy: what happens to longer items.
      sides: parts of an item that lose the same number of tokens: 1 for documents, 2 for pairs.
      removable: tokens that each side may lose; an item that would lose more is dropped. None: any number.
    """
    cut = np.zeros_like(lengths)
    if policy == "split":
        return cut, lengths
    excess = np.maximum(lengths - capacity, 0)
    if policy == "drop":
        return cut, np.where(excess > 0, 0, lengths)
    loss = -(-excess // sides)
    kept = lengths - sides * loss
    if policy != "keep_end":
        return cut, kept
    fits = np.ones(len(lengths), np.bool_) if removable is None else (loss == 0) | (loss <= removable)
    return np.where(fits, loss, 0), np.where(fits, kept, 0)


def refuse_too_long(lengths: Iterable[NDArray[np.int64]], capacity: int, *, pairs: bool) -> None:
    """Raise UserError if an item is longer than `capacity`. `lengths` are the positions of all items, in chunks."""
    count = many = longest = 0
    for chunk in lengths:
        count += len(chunk)
        many += int((chunk > capacity).sum())
        longest = max(longest, int(chunk.max(initial=0)))
    if not many:
        return
    are = "is" if many == 1 else "are"
    if pairs:
        raise UserError(
            "E-DATA-018",
            f"{many} of {count} pairs {are} longer than the sequence",
            why=f"a row holds both sides: sequence is {capacity}, the longest pair takes {longest}; "
            "data.too_long is stop",
            fix=f"data.too_long=keep_end or drop; sequence={longest} would hold the longest",
        )
    raise UserError(
        "E-DATA-020",
        f"{many} of {count} documents {are} longer than the sequence",
        why=f"sequence is {capacity}, the longest document takes {longest}; data.too_long is stop",
        fix=f"data.too_long=split, keep_start, keep_end or drop; sequence={longest} would hold the longest",
    )
