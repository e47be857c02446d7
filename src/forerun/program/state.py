"""The state of a training run and the metrics of a step. Both are immutable pytrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.methods.method import run_specs
from forerun.methods.optimizer_parameters import layouts_of
from forerun.nn import sharding, spec
from forerun.nn.spec import ParamSpec, Tree
from forerun.program import optimizer
from forerun.program.guard import Rule, Watch
from forerun.program.moments import placed
from forerun.program.schedule import Schedule
from forerun.resolve.resolved_job import ResolvedJob


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a step reads and replaces. Abstract states have ShapeDtypeStruct leaves."""

    step: Any  # int32: optimizer steps taken
    params: Tree
    optimizer: Tree
    average: Tree | None  # moving average of the trainable weights, if the job asks for it
    watch: Watch  # state of the divergence guard


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Metrics of one step, averaged over the complete batch."""

    loss: Any  # per unit of the objective's weight: nats per counted token for next-token prediction
    grad_norm: Any  # before clipping
    lr: Any
    tokens: Any  # sum of the objective's weights: counted tokens, or pairs; at least 1
    verdict: Any = None  # int32 `Verdict`, if there is a guard
    told: dict[str, Any] = field(default_factory=dict)  # other metrics of the objective, per unit of its weight


def started(tx: optax.GradientTransformation, trainable: Tree, average: bool, params: Tree, rule: Rule) -> State:
    """Return the state at step 0 with these weights.

    Args:
      tx: creates the optimizer state.
      trainable: a mask over `params`.
      average: whether the state has a moving average of the weights.
      rule: the guard's rule.
    """
    learning, _ = spec.split(params, trainable)
    return State(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=tx.init(learning),
        average=jax.tree.map(jnp.copy, learning) if average else None,
        watch=rule.watch(),
    )


def abstract_params(specs: Tree, mesh: Mesh) -> Tree:
    """Return the shapes and shardings of parameters, as they are stored between steps."""

    def stored(s: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.stored(mesh, s.shape, s.axes))

    return spec.map_specs(stored, specs)


def abstract_state(
    specs: Tree,
    tx: optax.GradientTransformation,
    trainable: Tree,
    average: bool,
    mesh: Mesh,
    rule: Rule,
    layouts: Tree,
) -> State:
    """Return the shapes and shardings of the state. Optimizer moments have the shardings of their parameters."""

    def replicated(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    params = abstract_params(specs, mesh)
    learning, _ = spec.split(params, trainable)
    moments = placed(jax.eval_shape(tx.init, learning), learning, layouts, mesh)
    return State(
        step=replicated(jax.ShapeDtypeStruct((), jnp.int32)),
        params=params,
        optimizer=moments,
        average=learning if average else None,
        watch=jax.tree.map(replicated, jax.eval_shape(rule.watch)),
    )


# ---- Memory of weights, optimizer state and gradients, computed from specs without compiling ----


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
