"""Stacked layers, and how a model runs through them.

Layers of one kind are one stack, and one scan runs them. If kinds repeat (Gemma: five local layers and a global one),
a scan step runs one period. Layers at the end that do not fill a period are in a separate stack, the tail.

For generation on a CPU, a stack may also be a tuple of layers, which run one after the other without a scan. A CPU
copies the weights of a layer out of its stack before it multiplies by them, and a decoded token uses them only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from forerun.models.keys import Stack

Step = Callable[[Any, Any], Any]  # (carry, one layer's weights) -> carry
StepWithOutput = Callable[[Any, Any], tuple[Any, Any]]  # (carry, one layer's weights) -> carry, output


def per_layer(steps: Sequence[Step], carry: Any, blocks: Any, tail: Any = None) -> Any:
    """Return the carry after all layers.

    Args:
        steps: One period of layer functions: layer n uses `steps[n % len(steps)]`.
        carry: The input of the first layer.
        blocks: The weights of the layers, stacked or in a tuple.
        tail: The weights of the layers at the end that do not fill a period, or None.
    """

    def silent(step: Step) -> StepWithOutput:
        return lambda carry, block: (step(carry, block), None)

    carry, _ = per_layer_with_outputs([silent(step) for step in steps], carry, blocks, tail)
    return carry


def per_layer_with_outputs(
    steps: Sequence[StepWithOutput], carry: Any, blocks: Any, tail: Any = None
) -> tuple[Any, Any]:
    """Return the carry after all layers, and the outputs of the layers: stacked, or in tuples if `blocks` is a tuple.

    The arguments are those of `per_layer`, but each step also returns an output.
    """
    period = len(steps)
    if isinstance(blocks, tuple):
        outputs = []
        for n, block in enumerate((*blocks, *(tail or ()))):
            carry, output = steps[n % period](carry, block)
            outputs.append(output)
        return carry, jax.tree.map(lambda *parts: parts, *outputs)
    if period == 1:
        carry, outputs = jax.lax.scan(steps[0], carry, blocks)
    else:
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), blocks)
        carry, outputs = jax.lax.scan(lambda carry, group: _unrolled(steps, carry, group), carry, groups)
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    if tail is None:
        return carry, outputs
    carry, last = _unrolled(steps, carry, tail)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outputs, last)


def _unrolled(steps: Sequence[StepWithOutput], carry: Any, stacked: Any) -> tuple[Any, Any]:
    """Run the stacked layers one after the other without a scan; return the carry and the stacked outputs."""
    count = jax.tree.leaves(stacked)[0].shape[0]
    outputs = []
    for n, step in enumerate(steps[:count]):
        carry, output = step(carry, jax.tree.map(lambda leaf, n=n: leaf[n], stacked))
        outputs.append(output)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


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

    return replace(params, **{stack.name: layers_of(getattr(params, stack.name), stack.layers) for stack in stacks})
