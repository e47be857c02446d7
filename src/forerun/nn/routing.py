"""Mixture of experts: the router, the order of tokens by expert, and the experts' MLP.

B batch, S sequence, E embed, X experts, K experts per token, M width of an expert's MLP, N = B x S tokens.

Each device sorts its own tokens by expert and multiplies the groups with `ragged_dot`, so no token is dropped. With the
mesh axis expert, it sorts the tokens of all devices of the axis and multiplies those of the experts that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from forerun.nn import sharding
from forerun.nn.weights.lowrank import array_axes, cast

# ---- The rows of a device's own experts, in rounds of a fixed number of rows. No row is dropped ----
# With the mesh axis expert, a device has the tokens of all devices of the axis and a part of the experts. The router
# decides how many pairs of a token and an expert it computes: between none and all. Arrays for all pairs would need as
# many times the memory as the axis has devices. So a loop computes the pairs in rounds, until none is left. With
# balanced experts, one round is enough.
#
# N tokens, K experts per token, P = N x K pairs, R pairs of a round, E embed, X experts of the device.

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


def _rounds_forward(
    products: Products, rows: int, x_NE: jax.Array, factors_NK: jax.Array, matrices: Any, pairs: Pairs
) -> tuple[jax.Array, Any]:
    return in_rounds(products, rows, x_NE, factors_NK, matrices, pairs), (x_NE, factors_NK, matrices, pairs)


def _rounds_backward(products: Products, rows: int, kept: Any, gradient_NE: jax.Array) -> tuple[Any, ...]:
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


in_rounds.defvjp(_rounds_forward, _rounds_backward)


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


# ---- Router ----


T = TypeVar("T")
Activation = Callable[[jax.Array, jax.Array], jax.Array]  # outputs of the gate and the up matrix -> inputs of down


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing(Generic[T]):
    """Sums over the tokens of a batch that are not padding. The first dimension is that of the layers."""

    counts_LX: T  # tokens of each expert
    probabilities_LX: T  # sum of the router's probabilities
    squares_L: T  # sum of the squared logarithm of the router's normalizer


@dataclass(frozen=True)
class Router:
    """How the experts of a token, and their weights, follow from the output of a router.

    Attributes:
        top: The number of experts per token.
        normalised: Whether the weights of the chosen experts are divided by their sum.
        sigmoid: Whether the weights are sigmoids of the logits, not their softmax.
        correction_X: What is added to the weights for the choice only, or None.
        scale_X: A factor of the weights of each expert, or None.
    """

    top: int
    normalised: bool = True
    sigmoid: bool = False
    correction_X: jax.Array | None = None
    scale_X: jax.Array | None = None


@dataclass(frozen=True)
class Choice:
    """The experts of each token."""

    ids_BSK: jax.Array
    weights_BSK: jax.Array  # float32
    sums: Routing[jax.Array] | None  # of one layer, without L; None if there is no mask


def choose(logits_BSX: jax.Array, router: Router, counted_BS: jax.Array | None) -> Choice:
    """Return the experts with the largest weights of each token.

    Args:
        logits_BSX: The output of the router, in float32.
        router: How the choice follows from it.
        counted_BS: The tokens that `sums` count, or None for no sums. Their probabilities are the softmax of the
            logits in every case, as in the balance loss of transformers.
    """
    probabilities_BSX = jax.nn.softmax(logits_BSX, axis=-1)
    scores_BSX = jax.nn.sigmoid(logits_BSX) if router.sigmoid else probabilities_BSX
    if router.correction_X is None:
        weights_BSK, ids_BSK = jax.lax.top_k(scores_BSX, router.top)
    else:
        corrected_BSX = scores_BSX + jax.lax.stop_gradient(router.correction_X.astype(jnp.float32))
        ids_BSK = jax.lax.top_k(corrected_BSX, router.top)[1]
        weights_BSK = _of_chosen(scores_BSX[..., None, :], ids_BSK)
    if router.normalised:
        weights_BSK = weights_BSK / jnp.sum(weights_BSK, axis=-1, keepdims=True)
    if router.scale_X is not None:
        weights_BSK = weights_BSK * _of_chosen(router.scale_X.astype(jnp.float32), ids_BSK)
    if counted_BS is None:
        return Choice(ids_BSK, weights_BSK, None)
    ours_BS = counted_BS.astype(jnp.float32)
    # A comparison and a sum, as in `_of_chosen`: a scatter would be slow on a TPU.
    chosen_BSKX = ids_BSK[..., None] == jnp.arange(logits_BSX.shape[-1])
    normalizers_BS = jax.nn.logsumexp(logits_BSX, axis=-1)
    sums = Routing(
        counts_LX=jnp.sum(jnp.where(chosen_BSKX, ours_BS[..., None, None], 0.0), axis=(0, 1, 2)),
        probabilities_LX=jnp.sum(probabilities_BSX * ours_BS[..., None], axis=(0, 1)),
        squares_L=jnp.sum(jnp.square(normalizers_BS) * ours_BS),
    )
    return Choice(ids_BSK, weights_BSK, sums)


def _of_chosen(values: jax.Array, ids_BSK: jax.Array) -> jax.Array:
    """Return the value of each chosen expert, [B, S, K]. The last dimension of `values` is that of the experts.

    This is a comparison and a sum, which the compiler fuses. The gradient of a gather, a scatter, is slow on a TPU.
    """
    return jnp.sum(jnp.where(ids_BSK[..., None] == jnp.arange(values.shape[-1]), values, 0.0), axis=-1)


def together(parts: Sequence[Any]) -> Routing[jax.Array] | None:
    """Return the sums of all layers from those of parts of the layers, or None for a model without experts."""
    found = jax.tree.leaves(parts, is_leaf=lambda one: isinstance(one, Routing))
    routings = [one for one in found if isinstance(one, Routing)]
    if not routings:
        return None
    made: Routing[jax.Array] = jax.tree.map(lambda *each: jnp.concatenate(each), *routings)
    return made


def expert_mlp(
    x_BSE: jax.Array,
    choice: Choice,
    weights: tuple[Any, Any, Any],
    experts: int,
    activation: Activation,
    biases: tuple[Any, Any, Any] | None = None,
) -> jax.Array:
    """Return the weighted sum of the outputs of each token's experts, [B, S, E].

    Each device computes the experts of its own tokens. It gathers the experts over fsdp. With tp, each device has a
    part of every expert's width, and the parts of the output are added. With the axis expert, each device has a part of
    the experts: it gathers the tokens of the axis, and the outputs of its experts are added and scattered back.

    Args:
        x_BSE: The input.
        choice: The experts of each token.
        weights: The matrices for gate, up and down of all experts, [X, E, M], [X, E, M] and [X, M, E].
        experts: The number of experts.
        activation: The function between the matrices.
        biases: The biases of gate, up and down, [X, M], [X, M] and [X, E], or None.
    """
    arrays, structure = jax.tree.flatten((cast(weights, x_BSE.dtype), cast(biases or (None, None, None), x_BSE.dtype)))
    lettered = (tuple(map(array_axes, weights, ("XEM", "XEM", "XME"))), () if biases is None else ("XM", "XM", "XE"))
    axes = jax.tree.leaves(lettered, is_leaf=lambda one: isinstance(one, str))
    sizes = sharding.ambient_sizes()
    stored = [sharding.stored_partition(one.shape, letters, sizes) for one, letters in zip(arrays, axes, strict=True)]
    rows = sharding.partition(x_BSE.shape, "BSE", sizes, sharding.BATCH_RULES)
    down_matrix = stored[len(jax.tree.leaves(weights[:2]))]  # the first array; those of an adapter follow
    adds = any("tp" in _names(part) for part in down_matrix)
    scatters = adds and x_BSE.shape[1] % sizes["tp"] == 0
    ways = sizes.get(sharding.EXPERT, 1)
    if experts % ways:
        raise ValueError(f"{experts} experts do not divide over mesh.expert={ways}")

    def products(x_PE: jax.Array, factors_P: jax.Array, matrices: Any, sizes_X: jax.Array) -> jax.Array:
        (gate, up, down), (gate_bias, up_bias, down_bias) = matrices
        members_PX = None if gate_bias is None else members(sizes_X, x_PE)
        gate_PM = plus_bias(members_PX, gate_bias, gate.grouped(x_PE, sizes_X))
        hidden_PM = activation(gate_PM, plus_bias(members_PX, up_bias, up.grouped(x_PE, sizes_X)))
        hidden_PM = (hidden_PM.astype(jnp.float32) * factors_P[:, None]).astype(hidden_PM.dtype)
        return plus_bias(members_PX, down_bias, down.grouped(hidden_PM, sizes_X), factors_P)

    def own(x: jax.Array, ids: jax.Array, factors: jax.Array, matrices: Any) -> jax.Array:
        top = ids.shape[-1]
        order, inverse, sizes_X = by_expert(ids.reshape(-1), experts)
        sorted_PE = dispatched(top, x.reshape(-1, x.shape[-1]), order, inverse)
        # The factors multiply the inputs of the last product, not its outputs. So the backward pass does not need these
        # outputs, and the recomputation of a layer skips that product.
        y_PE = products(sorted_PE, permuted(factors.reshape(-1), order, inverse), matrices, sizes_X)
        return combined(top, y_PE, order, inverse).reshape(x.shape)

    def shared(x: jax.Array, ids: jax.Array, factors: jax.Array, matrices: Any) -> jax.Array:
        """Return the outputs of this device's experts for all tokens of the axis, added over the devices."""
        splits = sharding.EXPERT in _names(rows[0])
        if splits:
            x, ids, factors = (
                jax.lax.all_gather(array, sharding.EXPERT, axis=0, tiled=True) for array in (x, ids, factors)
            )
        x_NE, top = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        own_ids = ids.reshape(-1, top) - jax.lax.axis_index(sharding.EXPERT) * (experts // ways)
        pairs = Pairs.of(own_ids, experts // ways)
        y_NE = in_rounds(products, round_rows(ids.size, ways), x_NE, factors.reshape(-1, top), matrices, pairs)
        y = y_NE.reshape(x.shape)
        if splits:
            scattered: jax.Array = jax.lax.psum_scatter(y, sharding.EXPERT, scatter_dimension=0, tiled=True)
            return scattered
        return jax.lax.psum(y, sharding.EXPERT)

    def local(x: jax.Array, ids: jax.Array, factors: jax.Array, *parts: jax.Array) -> jax.Array:
        whole = [_gathered(part, spec, adds) for part, spec in zip(parts, stored, strict=True)]
        matrices = jax.tree.unflatten(structure, whole)
        if adds and biases is not None:  # the devices of tp add their outputs, so only one of them has the bias
            gate, up, down = matrices[1]
            is_first = jax.lax.axis_index("tp") == 0
            matrices = (matrices[0], (gate, up, jnp.where(is_first, down, jnp.zeros_like(down))))
        y_BSE = own(x, ids, factors, matrices) if ways == 1 else shared(x, ids, factors, matrices)
        if not adds:
            return y_BSE
        added: jax.Array
        if scatters:
            added = jax.lax.psum_scatter(y_BSE, "tp", scatter_dimension=1, tiled=True)
        else:
            added = jax.lax.psum(y_BSE, "tp")
        return added

    results = PartitionSpec(rows[0], "tp") if scatters else rows
    mapped = sharding.by_hand(local, arguments=(rows, rows, rows, *stored), results=results)
    made: jax.Array = mapped(x_BSE, choice.ids_BSK, choice.weights_BSK, *arrays)
    return sharding.constrain(made, "BSE")


def members(sizes_X: jax.Array, x_PE: jax.Array) -> jax.Array:
    """Return 1 for the expert of each row and 0 for the others, [P, X], in the dtype of `x_PE`."""
    rows_P1, ends_X = jnp.arange(len(x_PE))[:, None], jnp.cumsum(sizes_X)
    return ((rows_P1 >= ends_X - sizes_X) & (rows_P1 < ends_X)).astype(x_PE.dtype)


def plus_bias(
    members_PX: jax.Array | None, bias_XO: jax.Array | None, y_PO: jax.Array, factors_P: jax.Array | None = None
) -> jax.Array:
    """Return the outputs with the bias of the expert of each row, multiplied by the row's factor if there is one.

    The bias of a row is a product with `members_PX`, because a scatter of its gradient would be slow on a TPU. Both are
    None for experts without biases.
    """
    if members_PX is None or bias_XO is None:
        return y_PO
    if factors_P is not None:
        members_PX = (members_PX.astype(jnp.float32) * factors_P[:, None]).astype(y_PO.dtype)
    return y_PO + members_PX @ bias_XO


def by_expert(ids_P: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the order that sorts pairs of a token and an expert, its inverse, and the pairs of each expert."""
    order_P = jnp.argsort(ids_P, stable=True)
    inverse_P = jnp.argsort(order_P)
    sizes_X = jnp.sum(ids_P[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return order_P, inverse_P, sizes_X


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatched(top: int, x_NE: jax.Array, order_P: jax.Array, inverse_P: jax.Array) -> jax.Array:
    """Return the token of each pair, [N x K, E], in the order of the experts.

    The gradient is a gather and a sum over K. JAX would compute it with a scatter, which is slow on a TPU.
    """
    return x_NE[order_P // top]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def combined(top: int, y_PE: jax.Array, order_P: jax.Array, inverse_P: jax.Array) -> jax.Array:
    """Return the sum of the rows of each token's pairs, [N, E]. The gradient is a gather."""
    rows_NKE = y_PE[inverse_P].reshape(-1, top, y_PE.shape[-1])
    return jnp.sum(rows_NKE, axis=1, dtype=jnp.float32).astype(y_PE.dtype)


dispatched.defvjp(
    lambda top, x_NE, order_P, inverse_P: (dispatched(top, x_NE, order_P, inverse_P), (order_P, inverse_P)),
    lambda top, orders, gradient_PE: (combined(top, gradient_PE, *orders), None, None),
)
combined.defvjp(
    lambda top, y_PE, order_P, inverse_P: (combined(top, y_PE, order_P, inverse_P), (order_P, inverse_P)),
    lambda top, orders, gradient_NE: (dispatched(top, gradient_NE, *orders), None, None),
)


@jax.custom_vjp
def permuted(x_P: jax.Array, order_P: jax.Array, inverse_P: jax.Array) -> jax.Array:
    """Return the values in another order. The gradient is a gather with the inverse order."""
    return x_P[order_P]


permuted.defvjp(
    lambda x_P, order_P, inverse_P: (permuted(x_P, order_P, inverse_P), inverse_P),
    lambda inverse_P, gradient_P: (gradient_P[inverse_P], None, None),
)


def _gathered(part: jax.Array, spec: PartitionSpec, keeps_tp: bool) -> jax.Array:
    """Return a weight gathered over all axes except tp. Its gradient is reduced and scattered over these axes.

    It remains split over the axis expert. Without `keeps_tp`, it is gathered over tp, too: tp may split the width of
    experts, but not the blocks of quantized ones.
    """
    kept = (sharding.EXPERT, "tp") if keeps_tp else (sharding.EXPERT,)
    for dim, axes in enumerate(spec):
        for axis in reversed(_names(axes)):
            if axis not in kept:
                part = jax.lax.all_gather(part, axis, axis=dim, tiled=True)
    return part


def _names(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
