"""Length buckets: rounding lengths up to a few values, so that one compiled program serves many lengths."""

from __future__ import annotations


def length_bucket(length: int, shortest: int) -> int:
    """Return the smallest bucket that is at least `length`.

    The buckets are 1, 1.5, 2, 3, 4, 6, ... times `shortest`, so at most a third of a bucket above `shortest` is empty.
    """
    bucket = shortest
    while bucket < length:
        if bucket * 3 // 2 >= length:
            return bucket * 3 // 2
        bucket *= 2
    return bucket
