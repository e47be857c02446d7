"""The step: one pure function from (state, batch) to (state, metrics)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forerun.models.base import Model
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import Objective
from forerun.program import optimizer
from forerun.program.state import Metrics, State


def make_step(
    model: Model,
    objective: Objective,
    compute: Compute,
    tx: optax.GradientTransformation,
    rate: optax.Schedule,
    trainable: Tree,
    ema: float | None,
) -> Callable[[State, Batch[jax.Array]], tuple[State, Metrics]]:
    def step(state: State, batch: Batch[jax.Array]) -> tuple[State, Metrics]:
        learning, frozen = spec.split(state.params, trainable)

        def loss(learning: Tree, micro: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return objective(model, spec.merge(learning, frozen), micro, compute)

        loss_sum, weight_sum, gradient_sum = accumulate(loss, learning, batch)
        weight_sum = jnp.maximum(weight_sum, 1.0)  # a batch in which nothing counts moves nothing
        gradient = jax.tree.map(lambda g: (g.astype(jnp.float32) / weight_sum).astype(g.dtype), gradient_sum)
        learning, moments = optimizer.update(tx, gradient, state.optimizer, learning)
        metrics = Metrics(
            loss=loss_sum / weight_sum,
            grad_norm=optax.tree.norm(gradient),
            lr=optimizer.rate_at(rate, state.step),
            tokens=weight_sum,
        )
        average = None if ema is None else optimizer.averaged(state.average, learning, ema)
        return replace(
            state,
            step=state.step + 1,
            params=spec.merge(learning, frozen),
            optimizer=moments,
            average=average,
        ), metrics

    return step


def accumulate(
    loss: Callable[[Tree, Batch[jax.Array]], tuple[jax.Array, jax.Array]], learning: Tree, batch: Batch[jax.Array]
) -> tuple[jax.Array, jax.Array, Tree]:
    """(loss sum, weight sum, gradient of the loss sum) over the leading A dimension of the batch.

    Everything is a sum until the whole batch is in, so the result is that of one large batch, even
    when micro-batches count different numbers of tokens.
    """
    one = jax.value_and_grad(loss, has_aux=True)

    def more(carry: Any, micro: Batch[jax.Array]) -> tuple[Any, None]:
        (loss_sum, weight_sum), gradient = one(learning, micro)
        # Without the barrier the TPU compiler tries to move the gradient's all-reduce out of the loop and fails
        # (RET_CHECK in while_loop_all_reduce_code_motion) when the read-out has a matrix of its own.
        gradient = jax.lax.optimization_barrier(gradient)
        return jax.tree.map(jnp.add, carry, (loss_sum, weight_sum, gradient)), None

    first = jax.tree.map(lambda x: x[0], batch)
    if batch.tokens.shape[0] == 1:
        (loss_sum, weight_sum), gradient = one(learning, first)
        return loss_sum, weight_sum, gradient
    zero = jnp.zeros((), jnp.float32)
    sums, _ = jax.lax.scan(more, (zero, zero, jax.tree.map(jnp.zeros_like, learning)), batch)
    return sums
