"""From shape letters to mesh axes, by one table each for weights and activations.

Model code says letters (`"BSHD"`); it never sees a mesh. The mesh is ambient (`jax.set_mesh`), and
without one every function here returns its argument. The legend of letters:

    B batch   S sequence   E embed   F mlp   H heads   K kv heads   D head   V vocab   L layers

Any other letter is a dimension that is never split. Two functions speak to JAX: `constrain` for an
activation, `gather` for a weight on its way into a contraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tp")
BATCH_AXES = ("data", "fsdp")

# For each mesh axis, the letters it may split, the first that divides evenly wins. FSDP falls back
# from the embedding to other dimensions, so an odd width never leaves a large weight unsplit.
WEIGHTS_STORED = (("tp", "VHKF"), ("fsdp", "EFVDHK"))
WEIGHTS_USED = WEIGHTS_STORED[:1]
SMALLEST_SPLIT = 1 << 16  # elements of one layer's weight
ACTIVATIONS = (("data", "B"), ("fsdp", "B"), ("tp", "HKFV"))
# Where no letter belongs to tp (the residual stream), it splits the sequence: gather + scatter are the
# same traffic as an all-reduce, and the saved layer inputs shrink by tp.
RESIDUALS = (("data", "B"), ("fsdp", "B"), ("tp", "S"))

Rules = tuple[tuple[str, str], ...]


def partition(shape: tuple[int, ...], axes: str, sizes: Mapping[str, int], rules: Rules) -> PartitionSpec:
    """The mesh axes of each dimension. A dimension that does not divide evenly stays whole."""
    taken: list[list[str]] = [[] for _ in shape]
    for axis, letters in rules:
        ways = sizes.get(axis, 1)
        if ways == 1:
            continue
        for letter in letters:
            dim = axes.find(letter)
            if dim >= 0 and shape[dim] % (ways * math.prod(sizes[a] for a in taken[dim])) == 0:
                taken[dim].append(axis)
                break
    return PartitionSpec(*(tuple(t) if len(t) > 1 else t[0] if t else None for t in taken))


def stored(mesh: Any, shape: tuple[int, ...], axes: str) -> NamedSharding:
    """How a weight rests in memory. Norms and biases rest whole over fsdp: a gather costs more than they do."""
    return NamedSharding(mesh, partition(shape, axes, mesh.shape, _stored_rules(shape, axes)))


def _stored_rules(shape: tuple[int, ...], axes: str) -> Rules:
    size = math.prod(n for n, letter in zip(shape, axes, strict=True) if letter != "L")
    return WEIGHTS_STORED if size >= SMALLEST_SPLIT else WEIGHTS_USED


def batched(mesh: Any, shape: tuple[int, ...], axes: str) -> NamedSharding:
    """How input data lies on the devices: split along the batch only."""
    return NamedSharding(mesh, partition(shape, axes, mesh.shape, ACTIVATIONS[:2]))


def ambient_sizes() -> dict[str, int]:
    """The axis sizes of the mesh in use, without those that `over_batch` has already split."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def _constrain(x: jax.Array, axes: str, rules: Rules) -> jax.Array:
    sizes = ambient_sizes()
    if math.prod(sizes.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(x.shape, axes, sizes, rules))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Lay an activation out by its letters."""
    return _constrain(x, axes, ACTIVATIONS if set(axes) & set("HKFV") else RESIDUALS)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(weight: jax.Array, axes: str) -> jax.Array:
    """A weight as it is used: whole over fsdp. Its gradient returns split, by a reduce-scatter."""
    return _constrain(weight, axes, WEIGHTS_USED)


def _gather_forward(weight: jax.Array, axes: str) -> tuple[jax.Array, None]:
    return gather(weight, axes), None


def _gather_backward(axes: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_constrain(gradient, axes, _stored_rules(gradient.shape, axes)),)


gather.defvjp(_gather_forward, _gather_backward)


def lookup(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Rows of a stored table, for tokens of all fsdp devices, still split along E as the table is."""
    rules: Rules = (("data", "B"), ("fsdp", "E"))
    everywhere = _constrain(tokens_BS, "BS", rules)
    return _constrain(table_VE[everywhere], "BSE", rules)


def by_hand(function: Callable[..., Any], *, arguments: tuple[Any, ...], results: Any) -> Callable[..., Any]:
    """Run `function` on each device's own parts, its collectives written out. Without a mesh, just run it."""
    if math.prod(ambient_sizes().values()) == 1:
        return function
    return jax.shard_map(function, in_specs=arguments, out_specs=results, check_vma=False)
