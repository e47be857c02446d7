"""The train step: a pure function from (state, batch, schedule) to (state, metrics).

The step accumulates gradients over micro-batches, updates the trainable weights, and asks the guard whether the update
may be kept. These parts are one compiled program, so the host does not take part in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import SequenceKey

from forerun.models.base import Model
from forerun.models.layer_kinds import SECTIONS
from forerun.nn import sharding, spec
from forerun.nn.compute import Compute
from forerun.nn.spec import Tree
from forerun.nn.weights import lowrank
from forerun.nn.weights.eight_bit import Codes, EightBitWeights
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
    rule: guard.Rule,
    drops: int | None,
    dcn_dtypes: tuple[Any, Any],
    eight_bits: EightBitWeights | None,
) -> Step:
    """Return the train step of a job.

    Args:
      model: the model object. It contains no arrays.
      objective: computes the sums of a micro-batch, of which the loss is differentiated.
      compute: dtype, attention kernel and remat policy.
      tx_of: returns the optimizer for a schedule, which is traced.
      rate_of: returns the learning rate after a number of taken steps, for the metrics.
      trainable: a mask over the parameters. The others get no gradient and no optimizer state.
      ema: the decay of the weights' moving average, or None for no average.
      rule: decides which steps are rejected.
      drops: the seed of dropout in adapters, or None without dropout.
      dcn_dtypes: the dtypes of gradients between slices, see `summed_over_slices`.
      eight_bits: the weights whose products have operands of 8 bits, or None for none.
    """

    # A gradient of a layer with frozen weights would also have parts for those. Such gradients are small: adapters.
    overlaps = eight_bits is None and drops is None and trains_layers(trainable)

    def step(state: State, batch: Batch[jax.Array], schedule: Schedule) -> tuple[State, Metrics]:
        # Only the trainable part is differentiated. Frozen weights, such as the base of LoRA or a teacher, need no
        # memory for gradients and moments. They may also have dtypes without a gradient, such as integers.
        learning, frozen = spec.split(state.params, trainable)

        def key_of(seed: int, number: jax.Array) -> jax.Array:
            # The key depends only on the seed, the step and the micro-batch. A step that is run again, after a
            # rejection or a restart, drops and rounds the same and gives the same result.
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), state.step), number)
            own = sharding.slice_number()  # of other rows
            return key if own is None else jax.random.fold_in(key, own)

        def loss(
            frozen: Tree, codes: Codes, learning: Tree, micro: Batch[jax.Array], number: jax.Array
        ) -> tuple[jax.Array, Sums]:
            params = spec.merge(learning, frozen)
            if eight_bits is not None:
                params = eight_bits.with_codes(params, codes, key_of(eight_bits.seed, number))
            if drops is not None:
                params = lowrank.noisy(params, key_of(drops, number))
            sums = objective(model, params, micro, compute)
            return sums.total, sums

        def summed(learning: Tree, frozen: Tree, batch: Batch[jax.Array]) -> tuple[Sums, Tree]:
            codes = {} if eight_bits is None else eight_bits.codes(spec.merge(learning, frozen))
            return accumulate(partial(loss, frozen, codes), learning, batch)

        # With several micro-batches, only the sum of their gradients crosses the network, after the last one.
        early = in_layers if batch.tokens.shape[0] == 1 and overlaps else None
        sums, gradient_sum = sharding.summed_over_slices(summed, (learning, frozen, batch), dcn_dtypes, early)
        # The maximum prevents 0 / 0 in a batch without counted targets, whose gradient is 0. The division is in
        # float32, because bfloat16 represents integers exactly only up to 256, and a batch has many more tokens.
        weight_sum = jnp.maximum(sums.weight, 1.0)
        gradient = jax.tree.map(lambda g: (g.astype(jnp.float32) / weight_sum).astype(g.dtype), gradient_sum)
        learning, moments = optimizer.update(tx_of(schedule), gradient, state.optimizer, learning)
        metrics = Metrics(
            loss=sums.loss / weight_sum,
            grad_norm=optax.tree.norm(gradient),  # before clipping, so that the guard can see a spike
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
        return guarded(rule, state, after, metrics)

    return step


def in_layers(path: tuple[Any, ...]) -> bool:
    """Return whether the key path is that of a layer's gradient in the result (sums, gradient)."""
    return len(path) > 1 and path[0] == SequenceKey(1) and _name(path[1]) in SECTIONS


def trains_layers(trainable: Tree) -> bool:
    """Return whether all weights of all layers are trainable."""
    leaves = jax.tree_util.tree_leaves_with_path(trainable)
    return all(bool(keep) for path, keep in leaves if path and _name(path[0]) in SECTIONS)


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", "")))


def guarded(rule: guard.Rule, before: State, after: State, metrics: Metrics) -> tuple[State, Metrics]:
    """Return `after` if the rule takes the step, else `before` with the halt set; and the metrics with the verdict.

    The decision is made on the devices. The host would have to wait for the metrics of each step before it dispatches
    the next one. It also could not return to the old state, because that state was donated.
    """
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
    """Return the sums and the gradient of the loss sum, over the leading dimension A of the batch.

    Sums are added and not averaged: the division by the total weight comes later. The result is therefore that of one
    large batch, even if micro-batches have different numbers of counted tokens.

    Args:
      loss: returns the loss sum and all sums, from the trainable weights, a micro-batch and its index.
      learning: the trainable weights.
      batch: arrays [A, B, S], with A micro-batches.
    """
    one = jax.value_and_grad(loss, has_aux=True)

    def more(carry: Any, micro: tuple[Batch[jax.Array], jax.Array]) -> tuple[Any, None]:
        (_, sums), gradient = one(learning, *micro)
        # Without the barrier, the TPU compiler tries to move the gradient's all-reduce out of the loop. It fails
        # (RET_CHECK in while_loop_all_reduce_code_motion) if the output layer does not share the embedding's matrix.
        gradient = jax.lax.optimization_barrier(gradient)
        return jax.tree.map(jnp.add, carry, (sums, gradient)), None

    first = jax.tree.map(lambda x: x[0], batch)
    numbers = jnp.arange(batch.tokens.shape[0])
    if len(numbers) == 1:  # no loop, and no second buffer for the sum of gradients
        (_, sums), gradient = one(learning, first, numbers[0])
        return sums, gradient
    # The loop starts from zeros and not from the first micro-batch, so that the model is in the program only once.
    _, shapes = jax.eval_shape(loss, learning, first, numbers[0])
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    total, _ = jax.lax.scan(more, (zeros, jax.tree.map(jnp.zeros_like, learning)), (batch, numbers))
    return total
