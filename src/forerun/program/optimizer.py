"""The Optax chain of a job: clipping, the optimizer, weight decay, and the learning rate of a schedule with warm-up.

Named optimizers differ only in the direction of an update. Weight decay and learning rate are applied in the same way
to all of them: w - lr x (direction + weight_decay x w). A custom optimizer does both on its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from forerun.config.optimizer import ADAFACTOR, ADAMW, ADAMW8BIT, LION, MUON
from forerun.config.schema import Optimizer
from forerun.errors import UserError
from forerun.methods.optimizer_parameters import ParamLayout
from forerun.models.plugin import Plugin, create_plugin
from forerun.nn.spec import Tree
from forerun.program.moments import AdafactorRule, AdamRule, MomentRule, MuonRule, by_parameter, eight_bit_rule
from forerun.program.schedule import GroupRates, Schedule, rate_at

PLUGIN = Plugin(
    "optimizer",
    "optimizer.options",
    "learning_rate is added by forerun: a function from the number of taken steps to the rate",
    needs=("init", "update"),
    protocol="optax.GradientTransformation",
)


def chain(
    optimizer: Optimizer,
    schedule: Schedule,
    decay_mask: Any,
    layouts: Tree = None,
    groups: Tree = None,
    dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """Return gradient clipping followed by the optimizer.

    Args:
      optimizer: the job's section.
      schedule: learning rate and weight decay. It may be traced: the structure of the state does not depend on it.
      decay_mask: True for the parameters to which weight decay applies.
      layouts: the layout of each parameter, for optimizers that treat matrices as matrices.
      groups: the number of the group of each parameter, -1 for none. None if the job has no groups.
      dtype: the dtype of Muon's matrix products.

    Raises:
      UserError: a custom optimizer cannot be used, or Muon has no matrix to train.
    """
    rate = partial(rate_at, optimizer.schedule, schedule)
    if optimizer.is_custom:
        made = create_plugin(optimizer.name, {"learning_rate": rate, **optimizer.options}, PLUGIN)
        steps = made if groups is None else optax.chain(made, _group_scale(schedule.groups, groups))
    elif groups is None:
        steps = optax.chain(
            _direction(optimizer, layouts, dtype),
            optax.masked(_decay(schedule.weight_decay), decay_mask),
            optax.scale_by_learning_rate(rate),
        )
    else:
        steps = optax.chain(
            _direction(optimizer, layouts, dtype),
            _group_decay(schedule, groups, decay_mask),
            optax.scale_by_learning_rate(rate),
            _group_scale(schedule.groups, groups),
        )
    return steps if optimizer.clip is None else optax.chain(optax.clip_by_global_norm(optimizer.clip), steps)


def _direction(o: Optimizer, layouts: Tree, dtype: Any) -> optax.GradientTransformation:
    """Return the part of a named optimizer that differs from the others."""
    if o.name == ADAMW:
        return optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps)
    if o.name == LION:
        return optax.scale_by_lion(b1=o.b1, b2=o.b2)
    if o.name == ADAFACTOR:
        return by_parameter(AdafactorRule, layouts)
    assert o.b1 is not None
    assert o.b2 is not None
    assert o.eps is not None
    adam = AdamRule(o.b1, o.b2, o.eps)
    if o.name == ADAMW8BIT:
        return by_parameter(partial(eight_bit_rule, adam), layouts)
    assert o.name == MUON
    muon = o.muon
    assert muon is not None
    if not any(layout.is_linear for layout in jax.tree.leaves(layouts)):
        raise UserError(
            "E-PROGRAM-010",
            "optimizer.name: muon has no matrix to train",
            why="Muon trains the matrices of linear layers, which a model declares as Dense weights",
            fix="use Dense for the matrices of your model (docs/how-to/own.md), or set optimizer.name=adamw",
        )

    def rule_of(layout: ParamLayout) -> MomentRule:
        return MuonRule(layout, muon.momentum, muon.scale, dtype) if layout.is_linear else adam

    return by_parameter(rule_of, layouts)


def _decay(weight_decay: Any) -> optax.GradientTransformation:
    """Return `optax.add_decayed_weights` for a traced float32 scalar, which in Optax would promote bfloat16 weights."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda g, p: g + jnp.asarray(weight_decay, p.dtype) * p, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _group_decay(schedule: Schedule, groups: Tree, decay_mask: Tree) -> optax.GradientTransformation:
    """Return weight decay with the values of the groups. A group with its own value applies it also to norms."""

    def decayed(number: int, masked: bool, g: jax.Array, p: jax.Array) -> jax.Array:
        own = schedule.groups[number].weight_decay if number >= 0 else None
        if own is None and not masked:
            return g
        return g + jnp.asarray(schedule.weight_decay if own is None else own, p.dtype) * p

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(decayed, groups, decay_mask, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _group_scale(rates: tuple[GroupRates, ...], groups: Tree) -> optax.GradientTransformation:
    """Return a transformation that multiplies the updates of each group by its factor of the learning rate."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(number: int, u: jax.Array) -> jax.Array:
            return u if number < 0 else u * jnp.asarray(rates[number].lr_scale, u.dtype)

        return jax.tree.map(scaled, groups, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@jax.named_scope("optimizer")
def update(tx: optax.GradientTransformation, gradient: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """Return the new parameters and the new optimizer state."""
    # forerun's own code uses strict dtype promotion. Optax mixes ints and floats, so it needs the standard rules.
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = tx.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments


def averaged(average: Any, params: Any, decay: float) -> Any:
    """Return the exponential moving average of the weights after one more step."""
    return jax.tree.map(lambda a, p: a + (1 - jnp.asarray(decay, a.dtype)) * (p.astype(a.dtype) - a), average, params)
