"""What a run carries from step to step. Replaced whole, never changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from forerun.nn import sharding, spec
from forerun.nn.spec import ParamSpec, Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: Any  # int32: optimizer steps done
    params: Tree
    optimizer: Tree
    average: Tree | None  # the weights' moving average, if the job wants one


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    loss: Any  # nats per counted token, over the whole batch
    grad_norm: Any
    lr: Any
    tokens: Any  # counted targets


def initial_state(
    specs: Tree, tx: optax.GradientTransformation, trainable: Tree, average: bool, key: jax.Array
) -> State:
    return started(tx, trainable, average, spec.initial(specs, key))


def started(tx: optax.GradientTransformation, trainable: Tree, average: bool, params: Tree) -> State:
    """Step 0 with these weights."""
    learning, _ = spec.split(params, trainable)
    return State(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=tx.init(learning),
        average=jax.tree.map(jnp.copy, learning) if average else None,
    )


def abstract_state(specs: Tree, tx: optax.GradientTransformation, trainable: Tree, average: bool, mesh: Mesh) -> State:
    """Shapes and shardings of the state. Optimizer moments lie where their parameters lie."""

    def placed(s: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.stored(mesh, s.shape, s.axes))

    def whole(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    params = spec.map_specs(placed, specs)
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
    )
