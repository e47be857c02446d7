"""The Optax chain of a job: clip, AdamW with decay on matrices only, a schedule with warm-up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from forerun.config.schema import Optimizer


def schedule(optimizer: Optimizer, steps: int, warmup_steps: int) -> optax.Schedule:
    """Learning rate by step: up in a line from lr / warmup_steps, then along the chosen shape."""
    lr, final = optimizer.lr, optimizer.lr * optimizer.final_lr
    after = max(1, steps - warmup_steps)
    shapes = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, final, after),
        "cosine": lambda: optax.cosine_decay_schedule(lr, after, alpha=optimizer.final_lr),
    }
    body = shapes[optimizer.schedule]()
    if warmup_steps == 0:
        return body
    climb = optax.linear_schedule(lr / warmup_steps, lr, max(1, warmup_steps - 1))
    return optax.join_schedules((climb, body), (warmup_steps,))


def rate_at(rate: optax.Schedule, step: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(rate(step), jnp.float32)


def chain(optimizer: Optimizer, rate: optax.Schedule, decay_mask: Any) -> optax.GradientTransformation:
    adamw = optax.adamw(
        rate,
        b1=optimizer.b1,
        b2=optimizer.b2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mask=decay_mask,
    )
    return adamw if optimizer.clip is None else optax.chain(optax.clip_by_global_norm(optimizer.clip), adamw)


@jax.named_scope("optimizer")
def update(tx: optax.GradientTransformation, gradient: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """(new params, new moments). Optax mixes int and float freely; our own code is held to strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = tx.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments


def averaged(average: Any, params: Any, decay: float) -> Any:
    """One step of an exponential moving average of the weights."""
    return jax.tree.map(lambda a, p: a + (1 - jnp.asarray(decay, a.dtype)) * (p.astype(a.dtype) - a), average, params)
