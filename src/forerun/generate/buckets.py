"""Lengths rounded up to a few, so that each compiled program serves many of them."""

from __future__ import annotations

SHORTEST = 64
CHUNK = 512  # tokens of a prompt that are read at once: their scores against the whole cache exist in memory


def length_bucket(length: int) -> int:
    """The smallest of 64, 96, 128, 192, 256, 384, ... that holds `length`: at most a half, mostly less, is empty."""
    bucket = SHORTEST
    while bucket < length:
        if bucket * 3 // 2 >= length:
            return bucket * 3 // 2
        bucket *= 2
    return bucket


def prompt_chunks(length: int, chunk: int = CHUNK) -> tuple[int, int]:
    """(how many chunks, tokens of each) a prompt is read in."""
    if length <= chunk:
        return 1, length_bucket(length)
    return -(-length // chunk), chunk


def row_bucket(rows: int, multiple: int) -> int:
    """The smallest power of two times `multiple` that holds so many rows."""
    bucket = multiple
    while bucket < rows:
        bucket *= 2
    return bucket
