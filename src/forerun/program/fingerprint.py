"""Fingerprints of arrays on their devices, to compare replicas that must be equal.

A change of one element always changes the fingerprint, because each operation on the element's bits is invertible.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


def fingerprint(array: jax.Array) -> jax.Array:
    """Return a uint32 that depends on the bits of each element and on its position.

    It is a sum over the elements, so a compiler can fuse it into one pass over the array (XLA for CPU does not).
    """
    if array.dtype == jnp.bool:
        bits = array.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    for dim in range(array.ndim):
        place = jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim)
        bits = bits + place * jnp.uint32(_ODD[dim % len(_ODD)])
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(bits ^ (bits >> 16), dtype=jnp.uint32)


def tree_fingerprint(tree: Any) -> jax.Array:
    """Return a uint32 that depends on all arrays of a tree and on their order. It is the same on every mesh."""
    leaves = [fingerprint(leaf) for leaf in jax.tree.leaves(tree)]
    odd = jnp.arange(1, 2 * len(leaves), 2, dtype=jnp.uint32)
    return jnp.sum(odd * jnp.stack(leaves), dtype=jnp.uint32)


def compiled_fingerprints(mesh: Mesh, like: Any) -> Any:
    """Return a compiled function from a state to a table of fingerprints [devices, arrays of the state].

    The devices are in the order of the mesh, and each of them gets the complete table. Each device contributes its own
    row to a sum. The compiler therefore cannot assume that replicas are equal and compare a device with itself.

    Args:
      like: the abstract state, with shardings.
    """

    def own(state: Any) -> jax.Array:
        row = jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(state)])
        table = jnp.zeros((mesh.size, row.size), jnp.uint32).at[jax.lax.axis_index(mesh.axis_names)].set(row)
        return jax.lax.psum(table, mesh.axis_names)

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, like)
    sharded = jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(sharded).trace(like).lower().compile()
