"""Memory of a job's weights, optimizer state and gradients, computed from specs without compiling."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from forerun.config.schema import Job
from forerun.methods.method import method_of
from forerun.models.registry import model_of
from forerun.nn import spec


@dataclass(frozen=True)
class StateBytes:
    """Bytes of all arrays, each counted once, regardless of how many devices hold it."""

    state_bytes: int  # weights and optimizer state
    gradient_bytes: int  # as large as the trainable weights


def resting(job: Job) -> StateBytes:
    """Return the bytes of a job's state and gradients. The vocabulary of its model must be known."""
    specs = method_of(job, chunk=1).specs(spec.cast(model_of(job.model).specs(), jnp.dtype(job.precision.params)))
    leaves = jax.tree.leaves(specs, is_leaf=spec.is_spec)
    weights = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    learned = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves if leaf.trainable)
    copies = 2 + (job.optimizer.ema is not None)  # Adam's two moments, and the EMA of the weights
    return StateBytes(weights + copies * learned, learned)
