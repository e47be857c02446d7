"""The rows of a device's own experts, in rounds of a fixed number of rows. No row is dropped.

With the mesh axis expert, a device has the tokens of all devices of the axis and a part of the experts. The router
decides how many pairs of a token and an expert it computes: between none and all. Arrays for all pairs would need as
many times the memory as the axis has devices. So a loop computes the pairs in rounds, until none is left. With balanced
experts, one round is enough.

N tokens, K experts per token, P = N x K pairs, R pairs of a round, E embed, X experts of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# inputs [R, E], weights of the router [R], the experts' matrices, pairs of each expert [X] -> weighted outputs [R, E]
Products = Callable[[jax.Array, jax.Array, Any, jax.Array], jax.Array]

ROOM = 1.25  # pairs of a round, as a multiple of the mean over the devices of the axis
MULTIPLE = 512  # a round has a multiple of these pairs: the rows of a tile of the kernels
NAME = "expert_rounds"  # of the loops in the compiled program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """The pairs of a token and an expert, sorted by expert. Those with experts of other devices come last."""

    order_P: jax.Array
    places_NK: jax.Array  # the place of each pair in that order
    ends_X: jax.Array  # the place behind the last pair of each expert

    @classmethod
    def of(cls, ids_NK: jax.Array, experts: int) -> Pairs:
        """Return the sorted pairs.

        Args:
            ids_NK: The experts of each token. Those of this device have the numbers from 0 to `experts` - 1.
            experts: The number of experts of the device.
        """
        ids_P = ids_NK.reshape(-1)
        ids_P = jnp.where((ids_P >= 0) & (ids_P < experts), ids_P, experts)
        order_P = jnp.argsort(ids_P, stable=True)
        places_NK = jnp.argsort(order_P).reshape(ids_NK.shape)
        counts_X = jnp.sum(ids_P[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
        return cls(order_P, places_NK, jnp.cumsum(counts_X))

    @property
    def total(self) -> jax.Array:
        """The number of pairs with an expert of this device."""
        return self.ends_X[-1]


def round_rows(pairs: int, devices: int) -> int:
    """Return the number of rows of a round.

    Args:
        pairs: All pairs of the tokens of the axis.
        devices: The devices of the axis.
    """
    return min(pairs, -(-round(ROOM * pairs) // (devices * MULTIPLE)) * MULTIPLE)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_rounds(
    products: Products, rows: int, x_NE: jax.Array, factors_NK: jax.Array, matrices: Any, pairs: Pairs
) -> jax.Array:
    """Return the sum of the weighted outputs of this device's experts for each token, [N, E].

    The number of rounds is known only when the program runs, and JAX has no gradient of such a loop. So the backward
    pass has its own loop. It computes the products of a round again.

    Args:
        products: The function of the rows of a round.
        rows: The number of rows of a round.
        x_NE: The tokens.
        factors_NK: The weights of the router, in float32.
        matrices: The second argument of `products`: arrays, and no other values.
        pairs: The pairs in the order of the experts.
    """
    flat_P = factors_NK.reshape(-1)

    def one(start: jax.Array, y_NE: jax.Array) -> jax.Array:
        now = _Round.at(start, rows, pairs)
        y_RE = products(x_NE[now.tokens_R], now.own(flat_P[now.pairs_R]), matrices, now.sizes_X)
        return y_NE + now.added(y_RE)

    return _loop(one, rows, pairs, jnp.zeros_like(x_NE))


def _forward(
    products: Products, rows: int, x_NE: jax.Array, factors_NK: jax.Array, matrices: Any, pairs: Pairs
) -> tuple[jax.Array, Any]:
    return in_rounds(products, rows, x_NE, factors_NK, matrices, pairs), (x_NE, factors_NK, matrices, pairs)


def _backward(products: Products, rows: int, kept: Any, gradient_NE: jax.Array) -> tuple[Any, ...]:
    x_NE, factors_NK, matrices, pairs = kept
    flat_P = factors_NK.reshape(-1)
    arrays, structure = jax.tree.flatten(matrices)
    floats = [jnp.issubdtype(array.dtype, jnp.floating) for array in arrays]
    learned = [array for array, is_float in zip(arrays, floats, strict=True) if is_float]

    def again(x_RE: jax.Array, factors_R: jax.Array, learned: list[jax.Array], sizes_X: jax.Array) -> jax.Array:
        rest = iter(learned)
        complete = [next(rest) if is_float else array for array, is_float in zip(arrays, floats, strict=True)]
        return products(x_RE, factors_R, jax.tree.unflatten(structure, complete), sizes_X)

    def one(start: jax.Array, sums: Any) -> Any:
        now = _Round.at(start, rows, pairs)
        inputs = x_NE[now.tokens_R], now.own(flat_P[now.pairs_R]), learned
        _, back = jax.vjp(partial(again, sizes_X=now.sizes_X), *inputs)
        x_RE, factors_R, more = back(gradient_NE[now.tokens_R])
        x_sum, factors_sum, learned_sum = sums
        return x_sum + now.added(x_RE), factors_sum + now.placed(factors_R), jax.tree.map(jnp.add, learned_sum, more)

    zeros = jnp.zeros_like(x_NE), jnp.zeros_like(factors_NK), [jnp.zeros_like(array) for array in learned]
    x_gradient, factors_gradient, gradients = _loop(one, rows, pairs, zeros)
    found = iter(gradients)
    # An integer has a gradient of the type float0, for which JAX takes a NumPy array.
    complete = [
        next(found) if is_float else np.zeros(array.shape, jax.dtypes.float0)
        for array, is_float in zip(arrays, floats, strict=True)
    ]
    return x_gradient, factors_gradient, jax.tree.unflatten(structure, complete), None


in_rounds.defvjp(_forward, _backward)


def _loop(one: Callable[[jax.Array, Any], Any], rows: int, pairs: Pairs, sums: Any) -> Any:
    """Return the sums after all rounds. `one` takes the first place of a round."""
    with jax.named_scope(NAME):
        total = pairs.total
        first = jnp.zeros((), jnp.int32)
        return jax.lax.while_loop(
            lambda state: state[0] < total, lambda state: (state[0] + rows, one(*state)), (first, sums)
        )[1]


@dataclass(frozen=True)
class _Round:
    """The pairs at some places of the order."""

    pairs_R: jax.Array
    tokens_R: jax.Array
    sizes_X: jax.Array
    is_own_R: jax.Array  # False for places behind the last pair with an expert of this device
    index_NK: jax.Array  # the row of each pair; only valid where `has_NK`
    has_NK: jax.Array

    @classmethod
    def at(cls, start: jax.Array, rows: int, pairs: Pairs) -> _Round:
        places_R = start + jnp.arange(rows, dtype=jnp.int32)
        # The last round may end behind the last pair. The places there repeat it, and are not own ones.
        pairs_R = pairs.order_P[jnp.minimum(places_R, len(pairs.order_P) - 1)]
        ends_X = jnp.clip(pairs.ends_X - start, 0, rows)
        index_NK = pairs.places_NK - start
        return cls(
            pairs_R=pairs_R,
            tokens_R=pairs_R // pairs.places_NK.shape[1],
            sizes_X=jnp.diff(ends_X, prepend=0),
            is_own_R=places_R < pairs.total,
            index_NK=jnp.clip(index_NK, 0, rows - 1),
            has_NK=(index_NK >= 0) & (index_NK < rows) & (pairs.places_NK < pairs.total),
        )

    def own(self, factors_R: jax.Array) -> jax.Array:
        """Return the factors of the pairs with an expert of this device, and 0 for the others."""
        return jnp.where(self.is_own_R, factors_R, 0.0)

    def placed(self, values_R: jax.Array) -> jax.Array:
        """Return the value of each pair of all tokens, [N, K], and 0 for the pairs of other rounds and devices."""
        return jnp.where(self.has_NK, values_R[self.index_NK], 0.0)

    def added(self, y_RE: jax.Array) -> jax.Array:
        """Return the sum of the rows of each token, [N, E].

        This is a gather and a sum over K, because a scatter is slow on a TPU. One block of tokens after the other, so
        that the rows of all pairs are never in memory together. Rows of other experts may hold any values.
        """
        tokens, top = self.index_NK.shape
        blocks = -(-tokens * top // len(y_RE))
        while tokens % blocks:
            blocks += 1

        def sums(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
            index_CK, has_CK = piece
            return jnp.sum(jnp.where(has_CK[..., None], y_RE[index_CK], 0), axis=1, dtype=jnp.float32).astype(
                y_RE.dtype
            )

        pieces = (x.reshape(blocks, -1, top) for x in (self.index_NK, self.has_NK))
        return jax.lax.map(sums, tuple(pieces)).reshape(tokens, -1)
