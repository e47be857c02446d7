"""The Optax chain of a job: clipping, AdamW with masked weight decay, and a schedule with warm-up."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forerun.config.schema import Optimizer
from forerun.program.schedule import Schedule, rate_at


def chain(optimizer: Optimizer, schedule: Schedule, decay_mask: Any) -> optax.GradientTransformation:
    """Return gradient clipping followed by AdamW.

    Args:
      optimizer: the job's section.
      schedule: learning rate and weight decay. It may be traced: the structure of the state does not depend on it.
      decay_mask: True for the parameters to which weight decay applies.
    """
    adamw = optax.chain(
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.masked(_decay(schedule.weight_decay), decay_mask),
        optax.scale_by_learning_rate(partial(rate_at, optimizer.schedule, schedule)),
    )
    return adamw if optimizer.clip is None else optax.chain(optax.clip_by_global_norm(optimizer.clip), adamw)


def _decay(weight_decay: Any) -> optax.GradientTransformation:
    """Return `optax.add_decayed_weights` for a traced float32 scalar, which in Optax would promote bfloat16 weights."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda g, p: g + jnp.asarray(weight_decay, p.dtype) * p, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@jax.named_scope("optimizer")
def update(tx: optax.GradientTransformation, gradient: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """Return the new parameters and the new optimizer state."""
    # forerun's own code uses strict dtype promotion. Optax mixes ints and floats, so it needs the standard rules.
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = tx.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments


def averaged(average: Any, params: Any, decay: float) -> Any:
    """Return the exponential moving average of the weights after one more step."""
    return jax.tree.map(lambda a, p: a + (1 - jnp.asarray(decay, a.dtype)) * (p.astype(a.dtype) - a), average, params)
