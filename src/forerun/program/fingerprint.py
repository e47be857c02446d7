"""A number for what each device holds of each array of a state, so that copies that must be equal can be compared.

One changed element always changes the number: every step from the element to the sum can be undone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from forerun.nn.sharding import AXES

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


def fingerprint(array: jax.Array) -> jax.Array:
    """uint32 of the bits and their places, element by element into one sum, so that a compiler can fuse it into one
    reading of the array (the CPU's does not)."""
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


def whole_fingerprint(tree: Any) -> jax.Array:
    """uint32 of all arrays of a tree and their order, the same on every mesh."""
    leaves = [fingerprint(leaf) for leaf in jax.tree.leaves(tree)]
    odd = jnp.arange(1, 2 * len(leaves), 2, dtype=jnp.uint32)
    return jnp.sum(odd * jnp.stack(leaves), dtype=jnp.uint32)


def compiled_fingerprints(mesh: Mesh, like: Any) -> Any:
    """Compiled, from a state like this one to [devices of the mesh in its order, arrays of the state].

    Every device has the whole table. It is summed up from one row of each, so that the compiler cannot take what must
    be equal for equal.
    """

    def own(state: Any) -> jax.Array:
        row = jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(state)])
        table = jnp.zeros((mesh.size, row.size), jnp.uint32).at[jax.lax.axis_index(AXES)].set(row)
        return jax.lax.psum(table, AXES)

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, like)
    whole = jax.shard_map(own, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jax.jit(whole).trace(like).lower().compile()
