"""The disk space that the checkpoints of a run need, checked before the run starts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from forerun.errors import StorageError
from forerun.storage.address import Address
from forerun.storage.folder import LocalFolder
from forerun.units import KIB, Bytes

_BLOCK_BYTES = 4 * KIB
_FIXED_BYTES = 24 * KIB  # files that every save has, rounded up to blocks
_LEAF_BYTES = 700  # metadata of one array, in the files of Orbax and in the commit record


def saved_bytes(like: Any) -> Bytes:
    """Return the size of one save of the tree. Arrays are not compressed, and only one host writes each piece."""
    leaves = jax.tree.leaves(like)
    return Bytes(_FIXED_BYTES + sum(_LEAF_BYTES + _leaf_bytes(leaf) for leaf in leaves))


def needed_bytes(like: Any, keep: int) -> Bytes:
    """Return the space for `keep` checkpoints and for the next one, which is written before an old one is removed."""
    return Bytes((keep + 1) * saved_bytes(like))


def require_disk_space(folder: Path | str, needed: int) -> None:
    """Raise StorageError if the disk of `folder` has less than `needed` bytes.

    Space that existing checkpoints in the folder use counts as free, because new ones replace them. A bucket has no
    limit.
    """
    if Address.of(folder).is_remote:
        return
    storage = LocalFolder(Path(folder).resolve())
    free, held = storage.free_bytes(), storage.used_bytes(_BLOCK_BYTES)
    if free + held < needed:
        raise StorageError(
            "E-CHECKPOINT-009",
            f"the checkpoints of this run need {Bytes(needed)}, but only {Bytes(free + held)} can be used",
            why=f"{storage.address}: {Bytes(free)} free, {Bytes(held)} used by its checkpoints",
            fix=f"free {Bytes(needed - free - held)} there, keep fewer (checkpoint.keep=1), or use another disk "
            "(runs=/path)",
        )


def _leaf_bytes(leaf: Any) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * int(jnp.dtype(leaf.dtype).itemsize)
