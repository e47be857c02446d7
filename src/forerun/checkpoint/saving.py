"""How Orbax saves: its settings, and a copy of the state from which a save can be tried again."""

from __future__ import annotations

from typing import Any

import jax
from orbax.checkpoint import v1 as orbax

from forerun.checkpoint import hosts


def host_copy(state: Any) -> Any:
    """Return a copy of the arrays in the host's memory.

    The copy is begun before the next step may reuse the devices' buffers, and this function does not wait for its end.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"), may_alias=False)

    return jax.tree.map(copy, state)


def orbax_context() -> orbax.Context:
    """Return the settings for saves."""
    context = orbax.Context()
    context.multiprocessing.active_processes = hosts.everybody()
    # Cutting replicated arrays into slices, one per replica, would compile programs in the middle of a run.
    context.array.saving.use_replica_parallel = False
    # Trained weights shrink by a twelfth, for most of a save's time; and without it the disk needed is known.
    context.array.saving.use_compression = False
    return context
