"""Agreement between the hosts of a run. With a single host, these functions need no communication."""

from __future__ import annotations

import jax
import numpy as np


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
