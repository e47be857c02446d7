"""Buckets for prompt lengths and row counts, so that few programs are compiled."""

from __future__ import annotations

from forerun.nn.lengths import length_bucket

SHORTEST = 64
CHUNK = 512  # tokens of a prompt per step; limits the attention scores, which are CHUNK x cache length


def prompt_chunks(length: int, chunk: int = CHUNK) -> tuple[int, int]:
    """Return the number of chunks for a prompt, and the number of tokens of each chunk."""
    if length <= chunk:
        return 1, length_bucket(length, SHORTEST)
    return -(-length // chunk), chunk


def row_bucket(rows: int, multiple: int) -> int:
    """Return the smallest power of two times `multiple` that is at least `rows`."""
    bucket = multiple
    while bucket < rows:
        bucket *= 2
    return bucket
