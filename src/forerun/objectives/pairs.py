"""What rows of pairs and the objectives on them agree about: names of arrays, and how many pairs a row may have."""

from __future__ import annotations

PAIRS = "pairs"  # [rows, S] int32: k chosen side of the row's k-th pair, -k its rejected side, 0 none
REFERENCE = "reference"  # [rows, most_pairs(S), 2] float32: what the reference model says of chosen and rejected
ROOM = 16  # positions that a pair takes at least, where a row has them


def most_pairs(sequence: int) -> int:
    """Of a row of that length."""
    return max(1, sequence // ROOM)
