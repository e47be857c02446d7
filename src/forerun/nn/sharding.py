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
    """How a weight rests in memory."""
    return NamedSharding(mesh, partition(shape, axes, mesh.shape, WEIGHTS_STORED))


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
    return (_constrain(gradient, axes, WEIGHTS_STORED),)


gather.defvjp(_gather_forward, _gather_backward)


def lookup(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Rows of a stored table, for tokens of all fsdp devices, still split along E as the table is."""
    rules: Rules = (("data", "B"), ("fsdp", "E"))
    everywhere = _constrain(tokens_BS, "BS", rules)
    return _constrain(table_VE[everywhere], "BSE", rules)


def over_batch(
    function: Callable[..., tuple[jax.Array, ...]], *, arguments: tuple[str, ...], results: tuple[str, ...]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Run `function` on each device's own rows of the batch; add up what has no batch dimension.

    Arguments with a B are split along it, others are whole. A result without a B is a sum over the
    devices' parts; if it has an E that divides evenly, the sum comes back split along it by fsdp.
    """
    sizes = ambient_sizes()
    if sizes.get("data", 1) * sizes.get("fsdp", 1) == 1:
        return function

    def spec(axes: str) -> PartitionSpec:
        return PartitionSpec(*(BATCH_AXES if letter == "B" else None for letter in axes))

    def summed(part: jax.Array, axes: str) -> jax.Array:
        if _scatters(part.shape, axes):
            part = jax.lax.psum_scatter(part, "fsdp", scatter_dimension=axes.index("E"), tiled=True)
            return jax.lax.psum(part, "data")
        return jax.lax.psum(part, BATCH_AXES)

    def _scatters(shape: tuple[int, ...], axes: str) -> bool:
        return "E" in axes and shape[axes.index("E")] % sizes["fsdp"] == 0

    def local(*parts: jax.Array) -> tuple[jax.Array, ...]:
        outs = function(*parts)
        return tuple(out if "B" in axes else summed(out, axes) for out, axes in zip(outs, results, strict=True))

    def run(*whole: jax.Array) -> tuple[jax.Array, ...]:
        shapes = dict(zip(arguments, (x.shape for x in whole), strict=True))

        def out_spec(axes: str) -> PartitionSpec:
            if "B" not in axes and axes in shapes and _scatters(shapes[axes], axes):
                return PartitionSpec(*("fsdp" if letter == "E" else None for letter in axes))
            return spec(axes)

        return jax.shard_map(
            local,
            in_specs=tuple(spec(axes) for axes in arguments),
            out_specs=tuple(out_spec(axes) for axes in results),
            axis_names=set(BATCH_AXES),
            check_vma=False,
        )(*whole)

    return run
