"""Chunked losses for any rule. As in `cross_entropy.py`, the logits of all positions never exist at the same time.

A rule receives the logits of a chunk and other arrays of the same positions (sides). It returns named values for each
position, and the derivative of one of them, "loss", by the logits. B batch, S sequence, E embed, V vocab, C chunk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from forerun.nn.layers import soft_cap
from forerun.nn.sharding import batch_axes, by_hand
from forerun.objectives.cross_entropy import Split, in_chunks, logits_of, summed, unchunked

Arrays = dict[str, jax.Array]
LOSS = "loss"


class Rule(Protocol):
    """A loss function on a chunk of logits. It must be immutable and hashable, as a static argument."""

    def __call__(self, logits_BCV: jax.Array, sides: Arrays, tables: Arrays, split: Split) -> tuple[Arrays, jax.Array]:
        """Return named values [B, C] including "loss", and the derivative of "loss" by the logits [B, C, V].

        Args:
          logits_BCV: logits after the softcap. V may be this device's part of the vocabulary.
          sides: arrays of the same positions [B, C, ...].
          tables: arrays [V, ...], split over the vocabulary in the same way as the logits.
          split: the mesh axes; its softcap is None.
        """


@partial(jax.custom_vjp, nondiff_argnums=(0, 6, 7))
def chunked(
    rule: Rule,
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    chunk: int,
    softcap: float | None = None,
) -> Arrays:
    """Return the sums over positions of weight x the rule's values, in float32.

    Only "loss" is differentiable, and only by the hidden states and the matrix.

    Args:
      rule: returns the values and the derivative for a chunk.
      hidden_BSE: hidden states of the model.
      matrix_VE: read-out matrix of the model.
      weights_BS: weight of each position.
      sides: further arrays of the positions, [B, S, ...].
      tables: further arrays of the vocabulary, [V, ...].
      chunk: positions whose logits exist at one time.
      softcap: cap of the model's logits, if it has one.
    """
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_sums_local, rule=rule, chunk=chunk, split=split)
    sums: Arrays = by_hand(local, arguments=_arguments(split, sides, tables), results=P())(
        hidden_BSE, matrix_VE, weights_BS, sides, tables
    )
    return sums


def _forward(
    rule: Rule,
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    chunk: int,
    softcap: float | None,
) -> tuple[Arrays, tuple[jax.Array, jax.Array]]:
    # Gradients are computed in the forward pass, so that the logits are computed only once.
    split = Split.of(hidden_BSE, matrix_VE, softcap)
    local = partial(_sums_and_gradients_local, rule=rule, chunk=chunk, split=split)
    results = (P(), split.hidden_gradient, P(split.vocab, split.embed))
    sums, hidden_gradient, matrix_gradient = by_hand(
        local, arguments=_arguments(split, sides, tables), results=results
    )(hidden_BSE, matrix_VE, weights_BS, sides, tables)
    return sums, (hidden_gradient, matrix_gradient)


def _backward(
    rule: Rule, chunk: int, softcap: float | None, gradients: tuple[jax.Array, jax.Array], cotangents: Arrays
) -> tuple[Any, ...]:
    hidden, matrix = gradients
    cotangent = cotangents[LOSS]
    return hidden * cotangent.astype(hidden.dtype), matrix * cotangent.astype(matrix.dtype), None, None, None


chunked.defvjp(_forward, _backward)


def _arguments(split: Split, sides: Arrays, tables: Arrays) -> tuple[Any, ...]:
    hidden, matrix, weights, _ = split.arguments
    beside = {name: P(batch_axes(), split.context, *(None,) * (array.ndim - 2)) for name, array in sides.items()}
    return hidden, matrix, weights, beside, dict.fromkeys(tables, P(split.vocab, None))


@jax.named_scope("loss")
def _sums_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    *,
    rule: Rule,
    chunk: int,
    split: Split,
) -> Arrays:
    def figures(piece: Any) -> Arrays:
        hidden_BCE, weights_BC, beside = piece
        found, _, _ = _values_and_slope(rule, hidden_BCE, matrix_VE, beside, tables, split)
        return {name: jnp.sum(each_BC * weights_BC) for name, each_BC in found.items()}

    pieces = jax.tree.map(lambda x: in_chunks(x, chunk), (hidden_BSE, weights_BS, sides))
    start = _zeros(figures, pieces)
    total, _ = lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, figures(piece)), None), start, pieces)
    return lax.psum(total, split.rows)


@jax.named_scope("loss")
def _sums_and_gradients_local(
    hidden_BSE: jax.Array,
    matrix_VE: jax.Array,
    weights_BS: jax.Array,
    sides: Arrays,
    tables: Arrays,
    *,
    rule: Rule,
    chunk: int,
    split: Split,
) -> tuple[Arrays, jax.Array, jax.Array]:
    def parts(piece: Any) -> tuple[Arrays, jax.Array, jax.Array]:
        hidden_BCE, weights_BC, beside = piece
        found, slope_BCV, bend_BCV = _values_and_slope(rule, hidden_BCE, matrix_VE, beside, tables, split)
        slope_BCV = (slope_BCV * bend_BCV * weights_BC[..., None]).astype(hidden_BCE.dtype)
        more = jnp.einsum("BCV,BCE->VE", slope_BCV, hidden_BCE, preferred_element_type=jnp.float32)
        sums = {name: jnp.sum(each_BC * weights_BC) for name, each_BC in found.items()}
        return sums, more, jnp.einsum("BCV,VE->BCE", slope_BCV, matrix_VE)

    def one(carry: tuple[Arrays, jax.Array], piece: Any) -> tuple[tuple[Arrays, jax.Array], jax.Array]:
        sums, more, hidden_gradient = parts(piece)
        return jax.tree.map(jnp.add, carry, (sums, more)), hidden_gradient

    pieces = jax.tree.map(lambda x: in_chunks(x, chunk), (hidden_BSE, weights_BS, sides))
    start = _zeros(lambda piece: parts(piece)[:2], pieces)
    (sums, matrix_gradient), hidden_pieces = lax.scan(one, start, pieces)
    hidden_gradient = unchunked(hidden_pieces, hidden_BSE.shape)
    if split.vocab:
        hidden_gradient = summed(
            hidden_gradient, (split.vocab,), scatter=(split.sequence,) if split.sequence else None, dim=1
        )
    matrix_gradient = summed(matrix_gradient.astype(matrix_VE.dtype), split.rows, scatter=split.embed, dim=1)
    return lax.psum(sums, split.rows), hidden_gradient, matrix_gradient


def _values_and_slope(
    rule: Rule, hidden_BCE: jax.Array, matrix_VE: jax.Array, beside: Arrays, tables: Arrays, split: Split
) -> tuple[Arrays, jax.Array, jax.Array]:
    """Return the rule's values and derivative, and the derivative of the capped logits by the uncapped ones."""
    logits_BCV = soft_cap(logits_of(hidden_BCE, matrix_VE), split.softcap)
    found, slope_BCV = rule(logits_BCV, beside, tables, replace(split, softcap=None))
    bend = jnp.ones((), jnp.float32) if split.softcap is None else 1 - jnp.square(logits_BCV / split.softcap)
    return found, slope_BCV, bend


def _zeros(function: Any, pieces: Any) -> Any:
    """Return zeros in the structure of what `function` returns for one chunk, as the start of a sum."""
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], pieces))
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
