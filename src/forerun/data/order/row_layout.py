"""The layout of rows: from segments of documents to the five arrays that a packer returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.data.documents import Mask, Tokens
from forerun.data.order.rows import Arrays


def lay_out_rows(
    read_many: Callable[[Sequence[int], Sequence[int]], list[tuple[Tokens, Mask | None]]],
    each: NDArray[np.int64],
    starts: NDArray[np.int64],
    positions: NDArray[np.int64],
    sequence: int,
) -> Arrays:
    """Return the five arrays of n rows.

    Args:
      read_many: returns the tokens from each address to another, and their masks (`Documents.read_many`).
      each: number of segments in each row [n].
      starts: address of the first token of each segment, row after row.
      positions: number of positions of each segment. The target of a position is the token after its input.
      sequence: positions of a row; those after the last segment are padding.
    """
    parts = read_many(starts.tolist(), (starts + positions + 1).tolist())
    flat = np.concatenate([tokens for tokens, _ in parts] or [np.zeros(0, np.int32)])
    # A segment of n positions reads n + 1 tokens: all but its last are inputs, all but its first are targets.
    ends = np.cumsum(positions + 1)
    inputs, targets = np.ones(len(flat), np.bool_), np.ones(len(flat), np.bool_)
    inputs[ends - 1] = False
    targets[ends - positions - 1] = False
    number = np.arange(len(positions)) - np.repeat(np.cumsum(each) - each, each) + 1
    owner = np.repeat(np.arange(len(each)), each)
    used = np.bincount(owner, positions, len(each)).astype(np.int64)
    filled = np.arange(sequence) < used[:, None]
    begins = np.cumsum(positions) - positions
    out: Arrays = {name: np.zeros((len(each), sequence), np.int32) for name in ("tokens", "targets")}
    out["tokens"][filled] = flat[inputs]
    out["targets"][filled] = flat[targets]
    if any(mask is not None for _, mask in parts):
        learned = np.concatenate([np.ones(len(t), np.bool_) if mask is None else mask for t, mask in parts])
        out["weights"] = np.zeros((len(each), sequence), np.float32)
        out["weights"][filled] = learned[targets]
    else:
        out["weights"] = filled.astype(np.float32)
    out["segments"] = np.zeros((len(each), sequence), np.int32)
    out["segments"][filled] = np.repeat(number, positions)
    out["positions"] = np.zeros((len(each), sequence), np.int32)
    out["positions"][filled] = np.arange(int(positions.sum())) - np.repeat(begins, positions)
    return out
