"""What a run carries from step to step. Replaced whole, never changed in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.nn import sharding, spec
from forerun.nn.spec import ParamSpec, Tree
from forerun.program.guard import Rule, Watch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: Any  # int32: optimizer steps taken
    params: Tree
    optimizer: Tree
    average: Tree | None  # the weights' moving average, if the job wants one
    watch: Watch | None = None  # the guard's, if there is one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    loss: Any  # nats per counted token, over the whole batch
    grad_norm: Any
    lr: Any
    tokens: Any  # counted targets
    verdict: Any = None  # int32: the guard's, if there is one
    told: dict[str, Any] = field(default_factory=dict)  # what else the objective tells, per unit of its weight


def started(
    tx: optax.GradientTransformation, trainable: Tree, average: bool, params: Tree, *, rule: Rule | None = None
) -> State:
    """Step 0 with these weights."""
    learning, _ = spec.split(params, trainable)
    return State(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=tx.init(learning),
        average=jax.tree.map(jnp.copy, learning) if average else None,
        watch=None if rule is None else rule.watch(),
    )


def abstract_params(specs: Tree, mesh: Mesh) -> Tree:
    """Shapes and shardings of parameters at rest."""

    def placed(s: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.stored(mesh, s.shape, s.axes))

    return spec.map_specs(placed, specs)


def abstract_state(
    specs: Tree,
    tx: optax.GradientTransformation,
    trainable: Tree,
    average: bool,
    mesh: Mesh,
    *,
    rule: Rule | None = None,
) -> State:
    """Shapes and shardings of the state. Optimizer moments lie where their parameters lie."""

    def whole(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    params = abstract_params(specs, mesh)
    learning, _ = spec.split(params, trainable)
    moments = jax.eval_shape(tx.init, learning)
    moments = optax.tree.map_params(
        tx,
        lambda moment, param: jax.ShapeDtypeStruct(moment.shape, moment.dtype, sharding=param.sharding),
        moments,
        learning,
        transform_non_params=whole,
    )
    return State(
        step=whole(jax.ShapeDtypeStruct((), jnp.int32)),
        params=params,
        optimizer=moments,
        average=learning if average else None,
        watch=None if rule is None else jax.tree.map(whole, jax.eval_shape(rule.watch)),
    )
