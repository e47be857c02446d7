"""Agreement between the hosts of a run. With a single host, these functions need no communication."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

_PIECE_BITS = 20  # the sum of 2,048 pieces fits in 32 bits


def is_first() -> bool:
    """Return whether this is host 0, which writes records and removes files for all hosts."""
    return jax.process_index() == 0


def part() -> tuple[int, int]:
    """Return the number of this host and the number of hosts."""
    return jax.process_index(), jax.process_count()


def several() -> bool:
    """Return whether the run has more than one host."""
    return jax.process_count() > 1


def all_hosts() -> set[int] | None:
    """Return the numbers of all hosts for Orbax; None if there is only one.

    With these numbers, Orbax synchronizes the hosts through jax's coordinator. Otherwise it would use collectives,
    which could mix with those of a training step.
    """
    return set(range(jax.process_count())) if several() else None


def broadcast_from_first(number: int) -> int:
    """Return the number that host 0 passes to this function. All hosts must call it."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def true_on_all(here: bool) -> bool:
    """Return whether `here` is true on all hosts. All hosts must call it."""
    if jax.process_count() == 1:
        return here
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.int32(here))).all())


def summed(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of each count over all hosts. All hosts must call it, with the same names."""
    if jax.process_count() == 1:
        return dict(counts)
    from jax.experimental import multihost_utils

    # Counts of bytes need more than the 32 bits that jax has by default, so each count is sent in three pieces.
    shifts = [_PIECE_BITS * number for number in range(3)]
    mask = (1 << _PIECE_BITS) - 1
    pieces = np.array([[(value >> shift) & mask for shift in shifts] for value in counts.values()], np.int32)
    found = np.asarray(multihost_utils.process_allgather(pieces)).astype(np.int64).sum(axis=0)
    totals = (sum(int(piece) << shift for piece, shift in zip(row, shifts, strict=True)) for row in found)
    return dict(zip(counts, totals, strict=True))
