"""Stacked layers, and how a model runs through them.

Layers of one kind are one stack, and one scan runs them. If kinds repeat (Gemma: five local layers and a global one),
a scan step runs one period. Layers of different shapes are in a stack each, and a scan step takes the layers of one
period from all of them. Layers at the end that do not fill a period are in separate stacks, the tail.

For generation on a CPU, a stack may also be a tuple of layers, which run one after the other without a scan. A CPU
copies the weights of a layer out of its stack before it multiplies by them, and a decoded token uses them only once.

With `unroll`, training has no scan either: the values that the backward pass needs are not copied into stacks. The
parameters stay stacked, so checkpoints do not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.models.keys import Stack

Step = Callable[[Any, Any], Any]  # (carry, one layer's weights) -> carry
StepWithOutput = Callable[[Any, Any], tuple[Any, Any]]  # (carry, one layer's weights) -> carry, output
_ONLY = ""  # the name of a stack without a name


def per_layer(steps: Sequence[Step], carry: Any, blocks: Any, *, unroll: bool = False) -> Any:
    """Return the carry after all layers.

    Args:
        steps: One period of layer functions: layer n uses `steps[n % len(steps)]`.
        carry: The input of the first layer.
        blocks: The weights of the layers, stacked or in a tuple.
        unroll: Whether the layers run one after the other without a scan.
    """
    silent = [lambda carry, block, step=step: (step(carry, block), None) for step in steps]
    return through(silent, carry, blocks, unroll=unroll)[0]


def per_layer_with_outputs(steps: Sequence[StepWithOutput], carry: Any, blocks: Any) -> tuple[Any, Any]:
    """Return the carry after all layers, and the outputs of the layers: stacked, or in tuples if `blocks` is a tuple.

    The arguments are those of `per_layer`, but each step also returns an output.
    """
    carry, outputs = through(steps, carry, blocks)
    return carry, joined([outputs])


def through(
    steps: Sequence[StepWithOutput],
    carry: Any,
    blocks: Any,
    names: Sequence[str] | None = None,
    *,
    scanned: bool = True,
    unroll: bool = False,
) -> tuple[Any, Any]:
    """Return the carry after the layers of one section, and the outputs of its layers.

    Args:
        steps: One period of layer functions.
        carry: The input of the first layer.
        blocks: The weights: a stack, a tuple of layers, or a mapping from names to stacks or tuples.
        names: The stack of each step, or None if `blocks` is not a mapping.
        scanned: Whether a scan runs over the periods. Otherwise the layers fill at most one period.
        unroll: Whether all periods run without a scan.

    Returns:
        The carry, and the outputs by the name of their stack, or without names if `names` is None. The outputs of a
        stack are stacked, or a list with one output per layer. `joined` joins the outputs of several sections.
    """
    stacks: Mapping[str, Any] = {_ONLY: blocks} if names is None else blocks
    order = (_ONLY,) * len(steps) if names is None else names
    period = Counter(order)
    if isinstance(next(iter(stacks.values())), tuple):
        carry, outputs = _one_by_one(steps, order, carry, stacks)
    elif unroll:
        carry, lists = _one_by_one(steps, order, carry, {name: _layers(stack) for name, stack in stacks.items()})
        outputs = {name: jax.tree.map(lambda *parts: jnp.stack(parts), *each) for name, each in lists.items()}
    elif not scanned:
        carry, outputs = _unrolled(steps, order, carry, stacks)
    elif len(steps) == 1:
        (name,) = stacks
        carry, found = jax.lax.scan(steps[0], carry, stacks[name])
        outputs = {name: found}
    else:
        groups = {
            name: jax.tree.map(lambda leaf, n=period[name]: leaf.reshape(-1, n, *leaf.shape[1:]), stack)
            for name, stack in stacks.items()
        }
        carry, outputs = jax.lax.scan(lambda carry, group: _unrolled(steps, order, carry, group), carry, groups)
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    return carry, outputs[_ONLY] if names is None else outputs


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of one stack in all sections: stacked, or in tuples if the sections have lists of outputs."""
    if isinstance(outputs[0], list):
        return jax.tree.map(lambda *parts: parts, *(one for section in outputs for one in section))
    return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _one_by_one(
    steps: Sequence[StepWithOutput], order: Sequence[str], carry: Any, stacks: Mapping[str, Any]
) -> tuple[Any, dict[str, list[Any]]]:
    """Run separate layers one after the other; return the carry and the outputs in lists."""
    waiting = {name: iter(layers) for name, layers in stacks.items()}
    outputs: dict[str, list[Any]] = {name: [] for name in stacks}
    for n in range(sum(map(len, stacks.values()))):
        name = order[n % len(steps)]
        carry, output = steps[n % len(steps)](carry, next(waiting[name]))
        outputs[name].append(output)
    return carry, outputs


def _unrolled(
    steps: Sequence[StepWithOutput], order: Sequence[str], carry: Any, stacks: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Run the stacked layers of one period without a scan; return the carry and the stacked outputs."""
    outputs: dict[str, list[Any]] = {name: [] for name in stacks}
    for name, step in zip(order, steps, strict=True):
        n = len(outputs[name])
        carry, output = step(carry, jax.tree.map(lambda leaf, n=n: leaf[n], stacks[name]))
        outputs[name].append(output)
    return carry, {name: jax.tree.map(lambda *parts: jnp.stack(parts), *each) for name, each in outputs.items()}


def _layers(stack: Any) -> tuple[Any, ...]:
    """Return the layers of a stack. Their gradients are concatenated once; indexing would add a stack per layer."""
    leaves, structure = jax.tree.flatten(stack)
    count = leaves[0].shape[0]
    pieces = [jax.lax.split(leaf, (1,) * count) for leaf in leaves]
    return tuple(jax.tree.unflatten(structure, [jnp.squeeze(piece[n], 0) for piece in pieces]) for n in range(count))


def unstacked(params: Any, stacks: Sequence[Stack]) -> Any:
    """Return `params` with each stack as a tuple of layers.

    Each stacked array is deleted as soon as it is copied, so that the weights are never in memory twice.
    """

    def apart(leaf: jax.Array) -> tuple[jax.Array, ...]:
        layers = tuple(leaf[n] for n in range(leaf.shape[0]))
        jax.block_until_ready(layers)
        leaf.delete()
        return layers

    def layers_of(stacked: Any, count: int) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(stacked)
        pieces = [apart(leaf) for leaf in leaves]
        return tuple(jax.tree.unflatten(structure, [piece[n] for piece in pieces]) for n in range(count))

    changed: dict[str, Any] = {}
    for stack in stacks:
        section, _, name = stack.name.partition(".")
        stacked = getattr(params, section)
        if name:
            changed.setdefault(section, {})[name] = layers_of(stacked[name], stack.layers)
        else:
            changed[section] = layers_of(stacked, stack.layers)
    return replace(params, **changed)
