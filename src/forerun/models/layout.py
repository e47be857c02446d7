"""Layers in stacks: how a model runs through them.

Layers of one kind are one stack under one scan. Where kinds repeat (Gemma: five local layers and a global one), a scan
step runs one period; layers that make no whole period lie in a stack of their own, the tail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

Step = Callable[[Any, Any], Any]  # (carry, one layer's weights) -> carry


def per_layer(steps: Sequence[Step], carry: Any, blocks: Any, tail: Any = None) -> Any:
    """The carry after all layers. `steps` is one period: layer n takes step n modulo its length."""
    period = len(steps)
    if period == 1:
        carry, _ = jax.lax.scan(lambda carry, block: (steps[0](carry, block), None), carry, blocks)
    else:
        groups = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), blocks)
        carry, _ = jax.lax.scan(lambda carry, group: (_unrolled(steps, carry, group), None), carry, groups)
    return carry if tail is None else _unrolled(steps, carry, tail)


def _unrolled(steps: Sequence[Step], carry: Any, stacked: Any) -> Any:
    """One after the other, for as many layers as are stacked."""
    count = jax.tree.leaves(stacked)[0].shape[0]
    for n, step in enumerate(steps[:count]):
        carry = step(carry, jax.tree.map(lambda leaf, n=n: leaf[n], stacked))
    return carry
