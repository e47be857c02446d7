"""Is there room for a run's checkpoints? Known from the shapes, asked before the run starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forerun.checkpoint.place import place_of
from forerun.errors import StorageError
from forerun.units import KIB, Bytes

_BLOCK_BYTES = 4 * KIB
_FIXED_BYTES = 24 * KIB  # the files that every save has, in blocks
_LEAF_BYTES = 700  # what Orbax and the commit record say of one array


def saved_bytes(like: Any) -> Bytes:
    """What one save of the tree takes: arrays are not compressed, each is written once over all hosts."""
    leaves = jax.tree.leaves(like)
    return Bytes(_FIXED_BYTES + sum(_LEAF_BYTES + _leaf_bytes(leaf) for leaf in leaves))


def needed_bytes(like: Any, keep: int) -> Bytes:
    """With `keep` checkpoints in place and the next one being written."""
    return Bytes((keep + 1) * saved_bytes(like))


def require_room(folder: Path | str, needed: int) -> None:
    """What the folder's checkpoints take already counts as room: they are replaced."""
    place = place_of(folder)
    free = place.room_bytes()
    if free is None:
        return
    held = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in place.sizes("").values()) if place.names() else 0
    if free + held < needed:
        raise StorageError(
            f"the checkpoints of this run need {Bytes(needed)}, and there is room for {Bytes(free + held)}",
            why=f"{place.address}: {Bytes(free)} free, {Bytes(held)} held by its checkpoints",
            fix=f"free {Bytes(needed - free - held)} there, keep fewer (checkpoint.keep=1), or take another disk "
            "(runs=/path)",
        )


def _leaf_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * int(jnp.dtype(leaf.dtype).itemsize)
