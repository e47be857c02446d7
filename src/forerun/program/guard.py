"""The part of the divergence guard that runs on the devices, inside of the train step.

A step is rejected if its loss or gradient is not finite, or if its gradient norm is a spike. A rejected step leaves the
state unchanged, bit for bit, and halts it. The host dispatches steps before it knows the result of earlier ones, so
steps on a halted state do nothing. The host then decides (`forerun.run.guard`) and releases the state with `released`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.nn.spec import Tree

ARMED = 16  # gradient norms that must be known before a norm can be a spike


class Verdict(IntEnum):
    """The outcome of a step on the devices."""

    TAKEN = 0
    NOT_FINITE = 1  # the loss or the gradient norm
    SPIKE = 2  # the gradient norm is far above the recent ones
    HALTED = 3  # an earlier step was rejected, so this one was not judged


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The guard's part of the state. It is saved in checkpoints."""

    halted: Any  # bool: a step was rejected and the host has not decided yet
    norms: Any  # float32[window]: ring buffer of the gradient norms of taken steps; 0 means unknown


@dataclass(frozen=True)
class Rule:
    """The rule by which a step is rejected.

    A gradient norm is a spike if it is more than `spike` times the median of the last `window` taken steps. The median
    is not computed: it is enough to compare the norm with each of them and to count. There are no spikes before `ARMED`
    norms are known. If `spike` is None, only steps that are not finite are rejected.
    """

    spike: float | None = 30.0
    window: int = 64

    def watch(self) -> Watch:
        """Return the initial `Watch`: not halted, no norms known."""
        return Watch(halted=jnp.zeros((), jnp.bool), norms=jnp.zeros((self.window,), jnp.float32))

    def verdict(self, watch: Watch, loss: jax.Array, norm: jax.Array) -> jax.Array:
        """Return the `Verdict` on a step as an int32 scalar."""
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
    """Return `watch` with the norm of a taken step. A norm of 0, of a batch without counted targets, means unknown."""
    return Watch(watch.halted, watch.norms.at[step % watch.norms.shape[0]].set(norm.astype(jnp.float32)))


def chosen(verdict: jax.Array, after: Tree, before: Tree) -> Tree:
    """Return `after` if the step is taken, else `before`.

    This is one select per array. On a TPU it is fused with the update that writes the array in place.
    """
    taken = verdict == Verdict.TAKEN
    return jax.tree.map(lambda new, old: old if new is old else jnp.where(taken, new, old), after, before)


def released(watch: Watch, *, disarmed: bool = False) -> Watch:
    """Return `watch` without the halt. Compiles nothing, so it may be called between steps.

    If `disarmed`, the known norms are cleared too: no step is a spike until `ARMED` norms are known again.
    """
    return Watch(_zeros(watch.halted), _zeros(watch.norms) if disarmed else watch.norms)


def _zeros(like: jax.Array) -> jax.Array:
    zeros = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: zeros[index])
