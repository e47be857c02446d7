"""What a job's weights and optimizer take at rest, whatever its method, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from forerun.config.schema import Job
from forerun.methods.method import method_of
from forerun.models.registry import model_of
from forerun.nn import spec


@dataclass(frozen=True)
class Resting:
    """Over all devices, each array once."""

    state_bytes: int
    gradient_bytes: int  # as large as what learns


def resting(job: Job) -> Resting:
    """The vocabulary of the job's model must be known."""
    specs = method_of(job, chunk=1).specs(spec.cast(model_of(job.model).specs(), jnp.dtype(job.precision.params)))
    leaves = jax.tree.leaves(specs, is_leaf=spec.is_spec)
    weights = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    learned = sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves if leaf.trainable)
    copies = 2 + (job.optimizer.ema is not None)  # two moments, and the average
    return Resting(weights + copies * learned, learned)
