"""Sharding rules: tables that map the letters of weights and activations to mesh axes.

Model code names dimensions by letters (`"BSHD"`) and never sees a mesh. The mesh is ambient (`jax.set_mesh`). Without
a mesh, `constrain` and `gather` return their argument. The letters are:

    B batch   S sequence   E embed   F mlp   H heads   K kv heads   D head   V vocab   L layers
    Y own embeddings of all layers   X experts   M mlp of an expert

A dimension with any other letter is never split. Models use two functions: `constrain` for an activation, and `gather`
for a weight right before it is used in a contraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

# ---- Gradients of layers that are summed over the slices inside the backward pass ----
# The sum of a layer's gradient does not depend on the layers before it. The TPU compiler moves it into the next
# iteration of the loop over the layers, so the network between slices works while the core computes the next gradient.

SliceSum = Callable[[jax.Array], jax.Array]


@dataclass
class LayerSums:
    """How the gradients of layers are summed while a function is traced.

    Attributes:
      over: returns the sum of an array over the slices.
      used: whether the model has passed its layers to `with_summed_gradient`.
    """

    over: SliceSum
    used: bool = False


_CURRENT: ContextVar[LayerSums | None] = ContextVar("layer_sums", default=None)


@contextmanager
def summing_layers(over: SliceSum) -> Iterator[LayerSums]:
    """SliceSum the gradients of layers by `over` in all functions that are traced inside the block."""
    sums = LayerSums(over)
    token = _CURRENT.set(sums)
    try:
        yield sums
    finally:
        _CURRENT.reset(token)


def with_summed_gradient(weights: Any) -> Any:
    """Return the weights of one layer. Inside `summing_layers`, their gradient is summed over the slices.

    A model calls it at the start of each of its layers, with all weights of the layer and nothing else.
    """
    sums = _CURRENT.get()
    if sums is None:
        return weights
    sums.used = True
    return _summed(sums.over, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(over: SliceSum, weights: Any) -> Any:
    return weights


def _summed_forward(over: SliceSum, weights: Any) -> tuple[Any, None]:
    return weights, None


def _summed_backward(over: SliceSum, _: None, gradient: Any) -> tuple[Any]:
    return (jax.tree.map(over, gradient),)


_summed.defvjp(_summed_forward, _summed_backward)


# ---- Tables of rules ----


AXES = ("data", "fsdp", "tp")  # of every mesh; a mesh may also have the axes EXPERT and CONTEXT
CONTEXT = "context"
EXPERT = "expert"
BATCH_AXES = ("data", "fsdp", EXPERT)  # those that split the batch, outermost first
SLICE = "slice"  # the outermost axis of a mesh over several TPU slices; other meshes do not have it

# For each mesh axis, the letters that it may split. The first letter whose dimension divides evenly is used. FSDP
# falls back from the embedding to other dimensions, so an odd width never leaves a large weight unsplit. Devices of a
# context group all need the same weights, so the context axis splits the stored weights as fsdp does. The expert axis
# splits the experts before fsdp, and all other weights as fsdp does: its devices also have different rows of a batch.
WEIGHTS_STORED = (
    ("tp", "VHKFM"),
    (EXPERT, "X"),
    ("fsdp", "XEYFVDHKM"),
    (EXPERT, "EYFVDHKM"),
    (CONTEXT, "XEYFVDHKM"),
)
# In a contraction a weight is split over tp only. fsdp splits the batch there, so every device of an fsdp group needs
# the same weights.
WEIGHTS_USED = WEIGHTS_STORED[:1]
WEIGHTS_SMALL = WEIGHTS_STORED[:2]  # small weights are stored like this: only devices with an expert need its arrays
SMALLEST_SPLIT = 1 << 16  # elements of one layer's weight; smaller weights are not split over fsdp
BATCH_RULES = tuple((axis, "B") for axis in BATCH_AXES)
ACTIVATIONS = (*BATCH_RULES, ("tp", "HKFV"))
# An activation without a letter of tp (the residual stream) is split along the sequence. The gather and the scatter
# cause the same traffic as an all-reduce, and the saved layer inputs shrink by tp.
RESIDUALS = (*BATCH_RULES, ("tp", "S"))
SEQUENCE = (CONTEXT, "S")  # the rule of activations and input data on a mesh with context parallelism
TOKENS = (*BATCH_RULES, SEQUENCE)  # the mesh axes that split tokens

Rules = tuple[tuple[str, str], ...]


def partition(shape: tuple[int, ...], axes: str, sizes: Mapping[str, int], rules: Rules) -> PartitionSpec:
    """Return the mesh axes that split each dimension. An axis that divides none of its letters evenly is not used.

    An axis may have several rules. The first one that applies is used.

    Args:
        shape: The dimensions of the array.
        axes: One letter for each dimension.
        sizes: The size of each mesh axis.
        rules: For each mesh axis, the letters that it may split, in order of preference.
    """
    taken: list[list[str]] = [[] for _ in shape]
    for axis, letters in rules:
        ways = sizes.get(axis, 1)
        if ways == 1 or any(axis in names for names in taken):
            continue
        for letter in letters:
            dim = axes.find(letter)
            if dim >= 0 and shape[dim] % (ways * math.prod(sizes[a] for a in taken[dim])) == 0:
                taken[dim].append(axis)
                break
    return PartitionSpec(*(tuple(t) if len(t) > 1 else t[0] if t else None for t in taken))


def stored(mesh: Any, shape: tuple[int, ...], axes: str) -> NamedSharding:
    """Return the sharding of a weight between its uses.

    Norms and biases are not split over fsdp, because gathering them would cost more than storing them.
    """
    return NamedSharding(mesh, stored_partition(shape, axes, mesh.shape))


def stored_partition(shape: tuple[int, ...], axes: str, sizes: Mapping[str, int]) -> PartitionSpec:
    """Return the mesh axes that split a weight between its uses. `sizes` are those of the mesh axes."""
    return partition(shape, axes, sizes, _stored_rules(shape, axes))


def _stored_rules(shape: tuple[int, ...], axes: str) -> Rules:
    size = math.prod(n for n, letter in zip(shape, axes, strict=True) if letter != "L")
    return WEIGHTS_STORED if size >= SMALLEST_SPLIT else WEIGHTS_SMALL


def batched(mesh: Any, shape: tuple[int, ...], axes: str) -> NamedSharding:
    """Return the sharding of input data, which is split along the batch, and along the sequence by the context axis."""
    return NamedSharding(mesh, partition(shape, axes, mesh.shape, ((SLICE, "B"), *BATCH_RULES, SEQUENCE)))


def ambient_sizes() -> dict[str, int]:
    """Return the axis sizes of the ambient mesh, without the axes that an enclosing `shard_map` already splits."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def batch_axes() -> tuple[str, ...]:
    """Return the axes of the ambient mesh that split the batch, for a partition spec."""
    sizes = ambient_sizes()
    return tuple(axis for axis in BATCH_AXES if axis != EXPERT or axis in sizes)


def _constrain(x: jax.Array, axes: str, rules: Rules) -> jax.Array:
    sizes = ambient_sizes()
    if math.prod(sizes.values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(x.shape, axes, sizes, rules))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Return the activation `x` with the sharding that its letters imply."""
    rules = ACTIVATIONS if set(axes) & set("HKFV") else RESIDUALS
    return _constrain(x, axes, (*BATCH_RULES, SEQUENCE, rules[-1]))


def context_axis(length: int) -> str | None:
    """Return the mesh axis that splits sequences of this length, or None if they are not split.

    A split sequence has two chunks on each device (`nn/context.py`), so other lengths are not split.
    """
    ways = ambient_sizes().get(CONTEXT, 1)
    return CONTEXT if ways > 1 and length % (2 * ways) == 0 else None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(weight: jax.Array, axes: str) -> jax.Array:
    """Return a stored weight as a contraction needs it: gathered over fsdp, still split over tp.

    The gradient has the stored sharding again, so XLA computes it with a reduce-scatter.
    """
    # A custom gradient is needed because JAX transposes a sharding constraint to the same constraint. That would keep
    # the gradient unsplit over fsdp: an all-reduce, and a full-size gradient on each device.
    return _constrain(weight, axes, WEIGHTS_USED)


def _gather_forward(weight: jax.Array, axes: str) -> tuple[jax.Array, None]:
    return gather(weight, axes), None


def _gather_backward(axes: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (as_stored(gradient, axes),)


gather.defvjp(_gather_forward, _gather_backward)


def as_used(array: jax.Array, axes: str) -> jax.Array:
    """Return a stored array without a gradient, such as codes of a weight, as a contraction needs it."""
    return _constrain(array, axes, WEIGHTS_USED)


def as_stored(gradient: jax.Array, axes: str) -> jax.Array:
    """Return the gradient of a weight with the sharding of the stored weight."""
    return _constrain(gradient, axes, _stored_rules(gradient.shape, axes))


def lookup(table_VE: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Return the rows of a stored table for the tokens, [B, S, E], split along E as the table is.

    Each device looks up the tokens of all devices of its fsdp group, and of its expert group and its context group.
    """
    # Tokens are small: gathering them over fsdp is far cheaper than gathering the table.
    sizes = ambient_sizes()
    own = sizes.get("fsdp", 1) * sizes.get(EXPERT, 1)
    by_width = table_VE.shape[1] % (own * sizes.get(CONTEXT, 1)) == 0
    rules: Rules = (("data", "B"), ("fsdp", "E"), (EXPERT, "E"), (CONTEXT, "E" if by_width else "S"))
    everywhere = _constrain(tokens_BS, "BS", rules)
    x_BSE = _constrain(table_VE[everywhere], "BSE", rules)
    if sizes.get(CONTEXT, 1) == 1 or not by_width:
        return x_BSE
    # The partitioner moves the split of E to B or S by an all-to-all, for one mesh axis at a time: first that of the
    # context axis, the minor part of the split. For both in one step, it would first give each device the complete x.
    x_BSE = _constrain(x_BSE, "BSE", (*rules[:3], SEQUENCE))
    return _constrain(x_BSE, "BSE", (*BATCH_RULES, SEQUENCE))


def by_hand(function: Callable[..., Any], *, arguments: tuple[Any, ...], results: Any) -> Callable[..., Any]:
    """Return `function` mapped over the devices by `shard_map`, or `function` itself without a mesh.

    Args:
        function: A function of each device's local parts. It contains its own collectives.
        arguments: A partition spec for each argument.
        results: The partition specs of the results.
    """
    if math.prod(ambient_sizes().values()) == 1:
        return function
    return jax.shard_map(function, in_specs=arguments, out_specs=results, check_vma=False)


def summed_over_slices(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    dtypes: tuple[Any, Any] | None = None,
    of_layers: Callable[[tuple[Any, ...]], bool] | None = None,
) -> Any:
    """Return the sum of `function(*arguments)` over the slices of the mesh, or its result on a mesh of one slice.

    Each slice computes the function on its rows of the batch. The other axes are partitioned as on one slice. Only the
    results cross the network between slices, once. A result that is split within a slice crosses it in these parts.

    Args:
        function: Returns a tree of sums over the rows of a batch.
        arguments: The arguments. All slices have the same, except for the last one: the batch, a tree of arrays
            [A, B, ...].
        dtypes: The dtype to which arrays with dimensions are rounded, and the dtype in which they cross the network.
            None keeps their own.
        of_layers: Returns whether the result with a key path is the gradient of a layer. These are summed in the
            backward pass already, if the model can (`with_summed_gradient`). None sums all results at the end.
    """
    if ambient_sizes().get(SLICE, 1) == 1:
        return function(*arguments)

    def over(x: jax.Array) -> jax.Array:
        if dtypes is None or x.ndim == 0:
            return jax.lax.psum(x, SLICE)
        rounded, sent = dtypes
        return jax.lax.psum(x.astype(rounded).astype(sent), SLICE).astype(x.dtype)

    def summed(*local: Any) -> Any:
        if of_layers is None:
            return jax.tree.map(over, function(*local))
        with summing_layers(over) as layers:
            found = function(*local)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if layers.used and of_layers(path) else over(x), found
        )

    return jax.shard_map(
        summed,
        in_specs=(*(PartitionSpec(),) * (len(arguments) - 1), PartitionSpec(None, SLICE)),
        out_specs=PartitionSpec(),
        axis_names={SLICE},
        check_vma=False,
    )(*arguments)


def slice_number() -> jax.Array | None:
    """Return the number of this slice inside of `summed_over_slices`, or None on a mesh of one slice."""
    return jax.lax.axis_index(SLICE) if SLICE in jax.sharding.get_abstract_mesh().manual_axes else None


def by_layer(x_LIO: jax.Array) -> jax.Array:
    """Return stacked matrices, split by layers over the mesh axes that divide them, or unchanged if none does."""
    sizes = ambient_sizes()
    every = (*BATCH_AXES, CONTEXT, "tp")
    for names in (every, every[1:], BATCH_AXES, BATCH_AXES[1:], ("tp",)):
        axes = tuple(axis for axis in names if axis in sizes)
        ways = math.prod(sizes.get(axis, 1) for axis in axes)
        if ways > 1 and x_LIO.shape[0] % ways == 0:
            return jax.lax.with_sharding_constraint(x_LIO, PartitionSpec(axes, None, None))
    return x_LIO


def coarsened(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Return `spec` without the axes that do not divide the dimensions of `shape`."""
    kept = []
    for dim, axes in zip(shape, (*spec, *(None,) * (len(shape) - len(spec))), strict=True):
        names = (axes,) if isinstance(axes, str) else axes or ()
        kept.append(axes if dim % math.prod(sizes[name] for name in names) == 0 else None)
    return PartitionSpec(*kept)
