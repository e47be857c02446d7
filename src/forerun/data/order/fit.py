"""First-fit-decreasing for many windows at once.

Items are taken from the longest to the shortest (equal ones in their order), and each goes into the first bin that
has room. All windows take their next item together, so one NumPy call serves them all; the bins are those of the
plain algorithm, window by window.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fitted(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For `lengths` [windows, items], all below `room` + 1 and 0 for "no item": the items of each window ordered by
    bin, then by when they were put there [windows, items], and the bin of each [windows, items].

    Items of length 0 come last; their bin is the largest number of its type.
    """
    # Sixteen bits where they suffice: NumPy sorts those by radix, and compares twice as many at a time.
    small = room < 2**15 and lengths.shape[1] < 2**16
    key = (room - lengths).astype(np.uint16 if small else np.int64)
    order = np.argsort(key, axis=1, kind="stable")
    decreasing = np.take_along_axis(lengths, order, 1).astype(np.int16 if small else np.int64)
    bins = _first_fit(np.ascontiguousarray(decreasing.T), room, int(lengths.sum(1).max(initial=0)))
    place = np.ascontiguousarray(bins.T).astype(np.uint16 if small else np.int64)
    place[decreasing == 0] = 2**16 - 1 if small else 2**63 - 1
    by_bin = np.argsort(place, axis=1, kind="stable")
    return np.take_along_axis(order, by_bin, 1), np.take_along_axis(place, by_bin, 1).astype(np.int64)


def _first_fit(items: NDArray[np.signedinteger], room: int, largest_sum: int) -> NDArray[np.int64]:
    """The bin of each item; `items` [items, windows] come in decreasing order."""
    count, windows = items.shape
    # Two bins that stand next to one another hold more than `room` together: never more bins than this.
    limit = 2 * largest_sum // room + 3
    left = np.full((windows, limit), room, items.dtype)
    flat, base = left.reshape(-1), np.arange(windows) * limit
    bins = np.zeros((count, windows), np.int64)
    width = 1  # bins looked at: all that are in use, and one that is empty
    used = int((items > 0).any(1).sum())
    for i in range(used):
        item = items[i]
        found = (left[:, :width] >= item[:, None]).argmax(1)
        bins[i] = found
        found += base
        flat[found] -= item
        if width < limit and (left[:, width - 1] < room).any():
            width += 1
    return bins
