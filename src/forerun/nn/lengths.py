"""Lengths rounded up to a few, so that each compiled program serves many of them."""

from __future__ import annotations


def length_bucket(length: int, shortest: int) -> int:
    """The smallest of 1, 1.5, 2, 3, 4, 6, ... times `shortest` that holds `length`: at most a third of it is empty."""
    bucket = shortest
    while bucket < length:
        if bucket * 3 // 2 >= length:
            return bucket * 3 // 2
        bucket *= 2
    return bucket
