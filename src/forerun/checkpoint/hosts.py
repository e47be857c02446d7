"""What the hosts of one run must agree on before they go on; alone, a host agrees with itself."""

from __future__ import annotations

import jax
import numpy as np


def is_first() -> bool:
    """The one that writes records and removes files for all."""
    return jax.process_index() == 0


def part() -> tuple[int, int]:
    """Which of how many this host is."""
    return jax.process_index(), jax.process_count()


def several() -> bool:
    return jax.process_count() > 1


def everybody() -> set[int] | None:
    """All hosts by number, for Orbax: told who they are, it waits for them at jax's coordinator, and not in collectives
    that could come between those of a step."""
    return set(range(jax.process_count())) if several() else None


def told_by_first(number: int) -> int:
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def true_on_all(here: bool) -> bool:
    if jax.process_count() == 1:
        return here
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.int32(here))).all())
