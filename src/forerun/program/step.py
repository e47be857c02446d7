"""The step: one pure function from (state, batch, schedule) to (state, metrics)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forerun.models.base import Model
from forerun.nn import lowrank, spec
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.objectives.base import Objective, Sums
from forerun.objectives.batch import Batch
from forerun.program import guard, optimizer
from forerun.program.schedule import Schedule
from forerun.program.state import Metrics, State

Step = Callable[[State, Batch[jax.Array], Schedule], tuple[State, Metrics]]


def make_step(
    model: Model,
    objective: Objective,
    compute: Compute,
    tx_of: Callable[[Schedule], optax.GradientTransformation],
    rate_of: Callable[[Schedule, jax.Array], jax.Array],
    trainable: Tree,
    ema: float | None,
    rule: guard.Rule | None = None,
    drops: int | None = None,
) -> Step:
    """`drops`: the seed of what is left out at random, if anything is."""

    def step(state: State, batch: Batch[jax.Array], schedule: Schedule) -> tuple[State, Metrics]:
        learning, frozen = spec.split(state.params, trainable)

        def loss(learning: Tree, micro: Batch[jax.Array], number: jax.Array) -> tuple[jax.Array, Sums]:
            params = spec.merge(learning, frozen)
            if drops is not None:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(drops), state.step), number)
                params = lowrank.noisy(params, key)
            sums = objective(model, params, micro, compute)
            return sums.loss, sums

        sums, gradient_sum = accumulate(loss, learning, batch)
        weight_sum = jnp.maximum(sums.weight, 1.0)  # a batch in which nothing counts moves nothing
        gradient = jax.tree.map(lambda g: (g.astype(jnp.float32) / weight_sum).astype(g.dtype), gradient_sum)
        learning, moments = optimizer.update(tx_of(schedule), gradient, state.optimizer, learning)
        metrics = Metrics(
            loss=sums.loss / weight_sum,
            grad_norm=optax.tree.norm(gradient),
            lr=rate_of(schedule, state.step),
            tokens=weight_sum,
            told={name: total / weight_sum for name, total in sums.told.items()},
        )
        average = None if ema is None else optimizer.averaged(state.average, learning, ema)
        after = replace(
            state,
            step=state.step + 1,
            params=spec.merge(learning, frozen),
            optimizer=moments,
            average=average,
        )
        return (after, metrics) if rule is None else guarded(rule, state, after, metrics)

    return step


def guarded(rule: guard.Rule, before: State, after: State, metrics: Metrics) -> tuple[State, Metrics]:
    """`after` if the rule lets the step pass; else `before`, halted."""
    assert before.watch is not None
    verdict = rule.verdict(before.watch, metrics.loss, metrics.grad_norm)
    after = replace(after, watch=guard.noted(before.watch, before.step, metrics.grad_norm))
    state = guard.chosen(verdict, after, before)
    halted = verdict != guard.Verdict.TAKEN
    return replace(state, watch=replace(state.watch, halted=halted)), replace(metrics, verdict=verdict)


def accumulate(
    loss: Callable[[Tree, Batch[jax.Array], jax.Array], tuple[jax.Array, Sums]],
    learning: Tree,
    batch: Batch[jax.Array],
) -> tuple[Sums, Tree]:
    """(sums, gradient of the loss sum) over the leading A dimension of the batch; a micro-batch knows its number.

    Everything is a sum until the whole batch is in, so the result is that of one large batch, even
    when micro-batches count different numbers of tokens.
    """
    one = jax.value_and_grad(loss, has_aux=True)

    def more(carry: Any, micro: tuple[Batch[jax.Array], jax.Array]) -> tuple[Any, None]:
        (_, sums), gradient = one(learning, *micro)
        # Without the barrier the TPU compiler tries to move the gradient's all-reduce out of the loop and fails
        # (RET_CHECK in while_loop_all_reduce_code_motion) when the read-out has a matrix of its own.
        gradient = jax.lax.optimization_barrier(gradient)
        return jax.tree.map(jnp.add, carry, (sums, gradient)), None

    first = jax.tree.map(lambda x: x[0], batch)
    numbers = jnp.arange(batch.tokens.shape[0])
    if len(numbers) == 1:
        (_, sums), gradient = one(learning, first, numbers[0])
        return sums, gradient
    _, shapes = jax.eval_shape(loss, learning, first, numbers[0])
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    total, _ = jax.lax.scan(more, (zeros, jax.tree.map(jnp.zeros_like, learning)), (batch, numbers))
    return total
