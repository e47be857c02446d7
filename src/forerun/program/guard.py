"""The guard of a step, on the device: an update that is no number, or a spike, is never taken.

A step that is refused leaves the state as it was, bit for bit, and halts it: steps that were dispatched behind it do
nothing until the host has decided (`loop.guard`) and lets the state go on with `released`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.nn.spec import Tree

ARMED = 16  # norms that must be known before one can be called a spike


class Verdict(IntEnum):
    """What became of a step."""

    TAKEN = 0
    NOT_FINITE = 1  # its loss or its gradient
    SPIKE = 2  # its gradient
    HALTED = 3  # it came behind one that was refused, and was not judged


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """What the guard carries from step to step, and into every checkpoint."""

    halted: Any  # bool: a step was refused and the host has not decided yet
    norms: Any  # float32[window]: gradient norms of the last steps taken, 0 where there is none


@dataclass(frozen=True)
class Rule:
    """A gradient norm is a spike if it is more than `spike` times the median of the last `window` steps taken.

    The median is never computed: a norm is beyond it if it is beyond more than half of them. Until a few are known
    there are no spikes. Without `spike`, only what is not finite is refused.
    """

    spike: float | None = 30.0
    window: int = 64

    def watch(self) -> Watch:
        return Watch(halted=jnp.zeros((), jnp.bool), norms=jnp.zeros((self.window,), jnp.float32))

    def verdict(self, watch: Watch, loss: jax.Array, norm: jax.Array) -> jax.Array:
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        code = jnp.where(finite, Verdict.TAKEN, Verdict.NOT_FINITE)
        code = jnp.where(finite & self._is_spike(watch, norm), Verdict.SPIKE, code)
        return jnp.where(watch.halted, Verdict.HALTED, code).astype(jnp.int32)

    def _is_spike(self, watch: Watch, norm: jax.Array) -> jax.Array:
        if self.spike is None:
            return jnp.zeros((), jnp.bool)
        known = watch.norms > 0
        smaller = known & (norm.astype(jnp.float32) > jnp.float32(self.spike) * watch.norms)
        return (known.sum() >= min(ARMED, self.window)) & (2 * smaller.sum() > known.sum())


def noted(watch: Watch, step: jax.Array, norm: jax.Array) -> Watch:
    """With the norm of the step taken. A batch in which nothing counted has norm 0, which says nothing."""
    return Watch(watch.halted, watch.norms.at[step % watch.norms.shape[0]].set(norm.astype(jnp.float32)))


def chosen(verdict: jax.Array, after: Tree, before: Tree) -> Tree:
    """`after` of a step that is taken, else `before`.

    A select for each array; on a TPU it joins the update that writes the array, in place.
    """
    taken = verdict == Verdict.TAKEN
    return jax.tree.map(lambda new, old: old if new is old else jnp.where(taken, new, old), after, before)


def released(watch: Watch, *, disarmed: bool = False) -> Watch:
    """The same, not halted; `disarmed`, it also knows no norms, so that nothing is a spike until some are known again.
    Nothing is compiled for it."""
    return Watch(_zeros(watch.halted), _zeros(watch.norms) if disarmed else watch.norms)


def _zeros(like: jax.Array) -> jax.Array:
    whole = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])
