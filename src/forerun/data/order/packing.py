"""Packing of items into rows: first-fit-decreasing inside windows of items.

Items are documents, or pairs of documents. A fixed permutation puts the items into an order (`packing_order`), so that
neighbours in a file do not share rows. The order is cut into windows of `window_size` items, and rows never mix
windows. The rows of a window can therefore be found without a pass over all items.

VERSION is part of the digest of all rows. Any change of the rows that `pack` returns needs a new version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.data.order.permutation import permuted
from forerun.errors import UserError

# ---- The policy for documents and pairs that are longer than a row (`data.too_long`) ----
#
# - split: all positions are kept. The packer cuts the document into full rows and a shorter rest.
# - keep_start, keep_end: the first or the last positions are kept. A pair keeps its end: both sides lose the same
#   number of tokens at the start of the prompt that they share.
# - drop: the document or the pair is omitted.
# - stop: a document or pair that is too long is an error.


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


VERSION = 1
KEY = 0x5EED0F_D0C5  # of the packing order: fixed, so that all jobs with the same documents share a plan
ROWS_PER_WINDOW = 128  # the last, half-empty row of a window costs 0.4 %
FEWEST, MOST = 1024, 1 << 16  # items in a window


def packing_order(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the items at these places of the order in which `count` items are packed."""
    return permuted(places, count, KEY)


def window_size(count: int, tokens: int, capacity: int) -> int:
    """Return the number of items in a window: enough for 128 rows of average items, in windows of even size.

    Args:
      count: number of items.
      tokens: tokens of all items. An item of n tokens takes n - 1 positions of a row.
      capacity: positions of a row.
    """
    positions = max(1.0, tokens / max(1, count) - 1)
    wanted = min(MOST, max(FEWEST, round(ROWS_PER_WINDOW * capacity / positions)))
    windows = max(round(count / wanted), -(-count // MOST), 1)
    return max(1, -(-count // windows))


def pack(lengths: NDArray[np.int64], capacity: int, window: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the items of all rows, row after row, and where each row starts among them.

    An item longer than `capacity` is cut into pieces, and each full piece fills a row. These rows come first in their
    window, ordered by item. The rest of a long item is packed with the other items. Items of length 0 are omitted.

    Args:
      lengths: positions of each item, in packing order [items].
      capacity: positions of a row.
      window: items that are packed together.
    """
    padded = np.zeros(-(-len(lengths) // window) * window, np.int64)
    padded[: len(lengths)] = lengths
    pieces, rests = np.divmod(padded.reshape(-1, window), capacity)
    places, bins = first_fit_decreasing(rests, capacity)
    # uint32, because a corpus of long documents has far more pieces than documents.
    items, row_starts = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint32)]
    packed_before = 0
    for number, count in enumerate((rests > 0).sum(1).tolist()):
        full = np.repeat(np.arange(window), pieces[number])
        in_window = np.concatenate([full, places[number, :count]])
        sizes = np.bincount(bins[number, :count])
        starts = np.concatenate([np.arange(len(full)), len(full) + np.cumsum(sizes) - sizes])
        items.append((number * window + in_window).astype(np.uint32))
        row_starts.append((packed_before + starts).astype(np.uint32))
        packed_before += len(in_window)
    if max(len(padded), packed_before) > 2**32:
        raise OverflowError(f"{packed_before} pieces of {len(lengths)} items cannot be packed in one step")
    return np.concatenate(items), np.concatenate(row_starts)


def first_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items of each window ordered by bin, and the bin of each; both are [windows, items].

    Items are taken from the longest to the shortest (equal ones in their order), and each goes into the first bin that
    has space. All windows take their next item together, so one NumPy call serves them all. The bins are those of the
    plain algorithm, window by window. Items in a bin keep the order in which they were put there. Items of length 0
    come last, and their bin is the largest number of its type.

    Args:
      lengths: [windows, items], at most `capacity` each; 0 is no item.
      capacity: size of a bin.
    """
    # Sixteen bits if they suffice: NumPy has a radix sort for them, and compares more of them at a time.
    small = capacity < 2**15 and lengths.shape[1] < 2**16
    key = (capacity - lengths).astype(np.uint16 if small else np.int64)
    order = np.argsort(key, axis=1, kind="stable")
    decreasing = np.take_along_axis(lengths, order, 1).astype(np.int16 if small else np.int64)
    bins = _first_fit(np.ascontiguousarray(decreasing.T), capacity, int(lengths.sum(1).max(initial=0)))
    place = np.ascontiguousarray(bins.T).astype(np.uint16 if small else np.int64)
    place[decreasing == 0] = 2**16 - 1 if small else 2**63 - 1
    by_bin = np.argsort(place, axis=1, kind="stable")
    return np.take_along_axis(order, by_bin, 1), np.take_along_axis(place, by_bin, 1).astype(np.int64)


def _first_fit(items: NDArray[np.signedinteger], capacity: int, largest_sum: int) -> NDArray[np.int64]:
    """Return the bin of each item; `items` [items, windows] come in decreasing order."""
    count, windows = items.shape
    # Two neighbouring bins together hold more than `capacity`, so there are never more bins than this.
    limit = 2 * largest_sum // capacity + 3
    left = np.full((windows, limit), capacity, items.dtype)
    flat, base = left.reshape(-1), np.arange(windows) * limit
    bins = np.zeros((count, windows), np.int64)
    width = 1  # bins to search: all that are in use, and one that is empty
    used = int((items > 0).any(1).sum())
    for i in range(used):
        item = items[i]
        found = (left[:, :width] >= item[:, None]).argmax(1)
        bins[i] = found
        found += base
        flat[found] -= item
        if width < limit and (left[:, width - 1] < capacity).any():
            width += 1
    return bins
