"""Memory of a job's weights, optimizer state and gradients, computed from specs without compiling."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from forerun.methods.method import run_specs
from forerun.methods.parameter_layouts import layouts_of
from forerun.nn import spec
from forerun.nn.spec import Tree
from forerun.program import optimizer
from forerun.program.schedule import Schedule
from forerun.resolve.resolved_job import ResolvedJob


@dataclass(frozen=True)
class StateBytes:
    """Bytes of all arrays, each counted once, regardless of how many devices hold it."""

    state_bytes: int  # weights and optimizer state
    gradient_bytes: int  # as large as the trainable weights
    optimizer_bytes: int  # the optimizer's part of the state, with the moving average of the weights
    learned: int  # number of trained parameters
    linear: int  # number of trained parameters in matrices of linear layers, which Muon trains


def resting(resolved: ResolvedJob) -> StateBytes:
    """Return the bytes of a job's state and gradients. The vocabulary of its model must be known."""
    job, specs = resolved.job, run_specs(resolved)
    trainable = spec.map_specs(lambda s: s.trainable, specs)
    weights = spec.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
    learning, _ = spec.split(weights, trainable)
    layouts, _ = spec.split(layouts_of(specs), trainable)
    decays = jax.tree.map(lambda _: True, learning)  # the state does not depend on the mask
    tx = optimizer.chain(job.optimizer, Schedule.of(job.optimizer, 1, 0), decays, layouts)
    moments = jax.eval_shape(tx.init, learning)
    average = learning if job.optimizer.ema is not None else None
    linear = [one for one in jax.tree.leaves(layouts) if one.is_linear]
    return StateBytes(
        state_bytes=_array_bytes((weights, moments, average)),
        gradient_bytes=_array_bytes(learning),
        optimizer_bytes=_array_bytes((moments, average)),
        learned=sum(leaf.size for leaf in jax.tree.leaves(learning)),
        linear=sum(one.matrices[0] * one.matrices[1] * one.matrices[2] for one in linear),
    )


def _array_bytes(tree: Tree) -> int:
    """Return the bytes of all arrays. Scalars, such as counters, are not counted."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree) if leaf.ndim)
