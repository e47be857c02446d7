"""How prompts and rows are rounded up to a few sizes."""

from __future__ import annotations

from forerun.nn.lengths import length_bucket

SHORTEST = 64
CHUNK = 512  # tokens of a prompt that are read at once: their scores against the whole cache exist in memory


def prompt_chunks(length: int, chunk: int = CHUNK) -> tuple[int, int]:
    """(how many chunks, tokens of each) a prompt is read in."""
    if length <= chunk:
        return 1, length_bucket(length, SHORTEST)
    return -(-length // chunk), chunk


def row_bucket(rows: int, multiple: int) -> int:
    """The smallest power of two times `multiple` that holds so many rows."""
    bucket = multiple
    while bucket < rows:
        bucket *= 2
    return bucket
