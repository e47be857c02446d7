"""Constants that rows of pairs and their objectives share: names of arrays, and the most pairs that fit in a row.

They are not in `batch.py`, because `forerun check` opens data without importing jax.
"""

from __future__ import annotations

PAIRS = "pairs"  # [rows, S] int32: k is the chosen side of the row's k-th pair, -k its rejected side, 0 is padding
REFERENCE = "reference"  # [rows, max_pairs(S), 2] float32: reference log-probabilities of chosen, rejected
ROOM = 16  # minimum number of positions that packing reserves for a pair


def max_pairs(sequence: int) -> int:
    """Return the maximum number of pairs in a row of `sequence` positions."""
    return max(1, sequence // ROOM)
