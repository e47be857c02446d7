"""Which rows of a batch this host has to make, and how they come to its devices."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from forerun.objectives.batch import Batch


class Placement:
    """Of batches shaped and laid out as `like` [A, B, S]."""

    def __init__(self, like: Batch[jax.ShapeDtypeStruct]) -> None:
        self._like = like

    @cached_property
    def held(self) -> NDArray[np.int64]:
        """The rows in B that stand on a device of this host, ascending.

        They need not be neighbours (a mesh follows the wires between chips, not the hosts), and when a row is split
        over the devices of several hosts, each of these hosts makes it.
        """
        like = self._like.tokens
        assert like.sharding is not None
        indices = like.sharding.addressable_devices_indices_map(like.shape).values()
        return np.unique(np.concatenate([_rows(index, like.shape) for index in indices]))

    def __call__(self, batch: Batch[NDArray[np.generic]]) -> Batch[jax.Array]:
        """The global batch, of which this host gives the rows it holds."""
        placed: Batch[jax.Array] = jax.tree.map(self._put, self._like, batch)
        return placed

    def _put(self, like: jax.ShapeDtypeStruct, rows: NDArray[np.generic]) -> jax.Array:
        def shard(index: Any) -> NDArray[np.generic]:
            where = np.searchsorted(self.held, _rows(index, like.shape))
            return rows[index[0], where[0] : where[-1] + 1, index[2]]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)


def _rows(index: Any, shape: tuple[int, ...]) -> NDArray[np.int64]:
    return np.arange(*index[1].indices(shape[1]), dtype=np.int64)
