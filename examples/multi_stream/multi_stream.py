"""A decoder with several residual streams, which a doubly stochastic matrix mixes at every layer.

Each attention and each MLP reads a weighted sum of the streams and writes its result to all of them. The rows and
columns of the mixing matrix sum to 1, so at any depth the mean of the streams stays and their size cannot grow. All
weights depend on the token. forerun needs no other file to train, plan and check the model.

Dimensions: N streams, M the same as inputs of a matrix, J weights of a connection for a token (N to read, N to write,
N x N to mix), P a strategy, Q the same as inputs of a matrix, B batch, S sequence, T new tokens, E embed, H heads, D
head, F mlp, V vocab, L layers. Streams come first in a shape: a
TPU pads the last two dimensions to at least 8 x 128, so four streams there would need two to four times the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from forerun.models.base import Readout
from forerun.models.layout import per_layer, per_layer_with_outputs
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.equilibrium import EquilibriumSolver, equilibrium
from forerun.nn.kv_cache import Cache
from forerun.nn.rope import Angles, Rope, angles, rotate
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense, contract

T = TypeVar("T")
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # queries, keys, values: each [B, S, H, D]
Carry = tuple[jax.Array, Any]  # the streams and the number of the layer
NewTokens = tuple[jax.Array, jax.Array]  # keys and values of new tokens


def doubly_stochastic(logits_NM: jax.Array, iterations: int) -> jax.Array:
    """Return matrices over the first two dimensions whose rows and columns sum to 1, for any logits.

    Sinkhorn's iterations run in log space, where nothing overflows and each gradient is that of a softmax. Altschuler's
    rounding then corrects the sums after any number of iterations: it shrinks large ones and spreads what is missing.
    """
    log_NM = logits_NM.astype(jnp.float32)

    def normalized(log_NM: jax.Array, _: None) -> tuple[jax.Array, None]:
        log_NM = log_NM - logsumexp(log_NM, axis=1, keepdims=True)
        return log_NM - logsumexp(log_NM, axis=0, keepdims=True), None

    log_NM, _ = jax.lax.scan(normalized, log_NM, None, length=iterations)
    mix_NM = jnp.exp(log_NM)
    mix_NM = mix_NM / jnp.maximum(jnp.sum(mix_NM, axis=1, keepdims=True), 1.0)
    mix_NM = mix_NM / jnp.maximum(jnp.sum(mix_NM, axis=0, keepdims=True), 1.0)
    rows_N = jnp.maximum(1.0 - jnp.sum(mix_NM, axis=1, keepdims=True), 0.0)
    columns_M = jnp.maximum(1.0 - jnp.sum(mix_NM, axis=0, keepdims=True), 0.0)
    return mix_NM + rows_N * columns_M / jnp.maximum(jnp.sum(rows_N, axis=0, keepdims=True), 1e-6)


@dataclass(frozen=True)
class NearIdentity:
    """An initializer for logits of a matrix close to the identity: 0 on the diagonal, `-off` elsewhere."""

    off: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.broadcast_to(self.off * (jnp.eye(shape[-1]) - 1.0), shape).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Connection(Generic[T]):
    """How one attention or MLP is connected to the streams: constant logits, and the part that depends on the token."""

    read: T
    write: T
    mix: T
    token: Dense[T]
    scale: T


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block(Generic[T]):
    attention: Connection[T]
    attention_norm: T
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    out: Dense[T]
    feed: Connection[T]
    mlp_norm: T
    gate: Dense[T]
    up: Dense[T]
    down: Dense[T]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Game(Generic[T]):
    """The equilibrium layer: what each stream wants from the token, and how it responds to the other streams."""

    norm: T
    into: Dense[T]
    taste: T
    among: Dense[T]
    out: Dense[T]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    embed: T
    blocks: Block[T]  # every leaf with a leading L
    norm: T
    head: Dense[T]
    game: Game[T] | None = None


@dataclass(frozen=True)
class MultiStream:
    """The model. forerun passes `vocab`; the other fields come from the job's `model.options`."""

    vocab: int
    embed: int = 128
    heads: int = 4
    layers: int = 4
    mlp: int = 384
    streams: int = 4
    iterations: int = 20  # Sinkhorn's iterations
    off: float = 8.0  # how close to the identity the mixing starts: a stream gets e ** -off of another
    theta: float = 10_000.0
    equilibrium: int = 0  # iterations of an equilibrium layer after the last layer; 0: no such layer
    tolerance: float = 1e-3  # its relative residual at which a token's iterations end
    damping: float = 1.0  # share of the new strategies in an iteration

    def specs(self) -> Params[ParamSpec]:
        V, E, H, F, N = self.vocab, self.embed, self.heads, self.mlp, self.streams
        D, into, back = E // H, Normal(0.02), Normal(0.02 / math.sqrt(2 * self.layers))
        norm = ParamSpec((E,), "E", Fill(1.0), decay=False)
        connection = Connection(
            read=ParamSpec((N,), "N", Normal(0.5), decay=False),  # random, because equal streams would stay equal
            write=ParamSpec((N,), "N", Normal(0.5), decay=False),
            mix=ParamSpec((N, N), "NM", NearIdentity(self.off), decay=False),
            token=Dense(ParamSpec((N, E, N * (N + 2)), "NEJ", Normal(1 / math.sqrt(N * E)), inputs=2)),
            scale=ParamSpec((N * (N + 2),), "J", Fill(0.01), decay=False),
        )
        block = Block(
            attention=connection,
            attention_norm=norm,
            query=Dense(ParamSpec((E, H, D), "EHD", into)),
            key=Dense(ParamSpec((E, H, D), "EHD", into)),
            value=Dense(ParamSpec((E, H, D), "EHD", into)),
            out=Dense(ParamSpec((H, D, E), "HDE", back, inputs=2)),
            feed=connection,
            mlp_norm=norm,
            gate=Dense(ParamSpec((E, F), "EF", into)),
            up=Dense(ParamSpec((E, F), "EF", into)),
            down=Dense(ParamSpec((F, E), "FE", back)),
        )
        head = Dense(ParamSpec((V, E), "VE", into, inputs=0))
        game = Game(
            norm=norm,
            into=Dense(ParamSpec((E, E), "EP", Normal(1 / math.sqrt(E)))),
            taste=ParamSpec((N, E), "NP", Normal(0.5), decay=False),
            among=Dense(ParamSpec((E, E), "QP", Normal(0.25 / math.sqrt(E)))),  # its largest singular value is 0.5
            out=Dense(ParamSpec((E, E), "PE", back)),
        )
        blocks = stack(block, self.layers)
        return Params(ParamSpec((V, E), "VE", into), blocks, norm, head, game if self.equilibrium else None)

    def apply(
        self, params: Any, tokens_BS: jax.Array, segments_BS: jax.Array, positions_BS: jax.Array, compute: Compute
    ) -> Readout:
        turns = angles(Rope(self.theta, self.embed // self.heads), positions_BS, segments_BS)

        def attend(q_BSHD: jax.Array, k_BSHD: jax.Array, v_BSHD: jax.Array) -> jax.Array:
            return attention(q_BSHD, k_BSHD, v_BSHD, segments_BS, window=None, kernel=compute.attention)

        def layer(x_NBSE: jax.Array, block: Block[jax.Array]) -> jax.Array:
            return self.layer(block, x_NBSE, turns, attend)

        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        x_NBSE = per_layer([compute.checkpointed(layer)], jnp.stack([x_BSE] * self.streams), params.blocks)
        return self.readout(params, x_NBSE, compute)

    def cache(self, rows: int, length: int, dtype: Any) -> Cache[ParamSpec]:
        """Return the specs of the cache. Streams are mixed token by token, so only attention needs earlier tokens."""
        return Cache.specs(self.layers, rows, length, self.heads, self.embed // self.heads, dtype)

    def extend(
        self,
        params: Any,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache[jax.Array],
        compute: Compute,
    ) -> tuple[Readout, Cache[jax.Array]]:
        """Return the read-out at the new tokens, and the cache with their keys and values."""
        turns = angles(Rope(self.theta, self.embed // self.heads), positions_BT, jnp.ones_like(positions_BT))

        def layer(carry: Carry, block: Block[jax.Array]) -> tuple[Carry, NewTokens]:
            x_NBTE, number = carry
            new: list[NewTokens] = []

            def attend(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
                new.append((k_BTHD, v_BTHD))
                return cached_attention(q_BTHD, k_BTHD, v_BTHD, cache.layer(number), positions_BT, window=None)

            return (self.layer(block, x_NBTE, turns, attend), number + 1), new[0]

        x_BTE = layers.embed(params.embed, tokens_BT, compute.dtype)
        (x_NBTE, _), new = per_layer_with_outputs([layer], (jnp.stack([x_BTE] * self.streams), 0), params.blocks)
        return self.readout(params, x_NBTE, compute), cache.with_tokens(positions_BT, *new, after_BTE=x_NBTE[0])

    def layer(self, block: Block[jax.Array], x_NBSE: jax.Array, turns: Angles, attend: Attend) -> jax.Array:
        """Return the streams after the attention and the MLP of a layer."""

        def attended(x_BSE: jax.Array) -> jax.Array:
            x_BSE = layers.rms_norm(x_BSE, block.attention_norm, 1e-6)
            q_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.query), turns), "query")
            k_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.key), turns), "key")
            v_BSHD = residual(contract("BSE,EHD->BSHD", x_BSE, block.value), "value")
            return contract("BSHD,HDE->BSE", constrain(attend(q_BSHD, k_BSHD, v_BSHD), "BSHD"), block.out)

        def fed(x_BSE: jax.Array) -> jax.Array:
            x_BSE = layers.rms_norm(x_BSE, block.mlp_norm, 1e-6)
            gate_BSF = residual(contract("BSE,EF->BSF", x_BSE, block.gate), "mlp_gate")
            up_BSF = residual(contract("BSE,EF->BSF", x_BSE, block.up), "mlp_up")
            return contract("BSF,FE->BSE", jax.nn.silu(gate_BSF) * up_BSF, block.down)

        x_NBSE = residual(constrain(x_NBSE, "NBSE"), "layer_in")
        x_NBSE = self.connected(block.attention, x_NBSE, attended)
        return self.connected(block.feed, x_NBSE, fed)

    def readout(self, params: Any, x_NBSE: jax.Array, compute: Compute) -> Readout:
        """Return the mean of the streams as hidden states, after the equilibrium layer if there is one."""
        told = {}
        if params.game is not None:
            x_NBSE, told["equilibrium_residual"] = self.settled(params.game, x_NBSE)
        hidden_BSE = layers.rms_norm(jnp.mean(x_NBSE, axis=0, dtype=jnp.float32), params.norm, 1e-6)
        return Readout(hidden_BSE.astype(compute.dtype), params.head.matrix("VE", compute.dtype), told=told)

    def settled(self, game: Game[jax.Array], x_NBSE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the streams plus their strategies at the Nash equilibrium, and its residual at each token.

        Stream n chooses the strategy z_n that is best against the mean of the other strategies: it maximises
        z_n . (drive_n + among mean) - sum h(z_n), where h' = artanh, so z_n = tanh(drive_n + among mean). At the
        equilibrium no stream can gain by a change of its own strategy.
        """
        dtype, others = x_NBSE.dtype, max(1, self.streams - 1)
        drive_NBSP = contract("NBSE,EP->NBSP", layers.rms_norm(x_NBSE, game.norm, 1e-6), game.into).astype(jnp.float32)
        drive_NBSP = drive_NBSP + game.taste.astype(jnp.float32)[:, None, None, :]

        def best(z_NBSP: jax.Array) -> jax.Array:
            mean_NBSQ = (jnp.sum(z_NBSP, axis=0) - z_NBSP) / others
            pull_NBSP = contract("NBSQ,QP->NBSP", mean_NBSQ.astype(dtype), game.among)
            return jnp.tanh(drive_NBSP + pull_NBSP.astype(jnp.float32))

        solver = EquilibriumSolver(self.equilibrium, tolerance=self.tolerance, damping=self.damping)
        z_NBSP, residual_BS = equilibrium(best, jnp.tanh(drive_NBSP), solver, axes=(0, 3))
        return x_NBSE + contract("NBSP,PE->NBSE", z_NBSP.astype(dtype), game.out), residual_BS

    def connected(
        self, connection: Connection[jax.Array], x_NBSE: jax.Array, branch: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Return mix x + write branch(read x), with weights for each token. Sums over streams are in float32."""
        N, dtype = self.streams, x_NBSE.dtype
        wide_NBSE = x_NBSE.astype(jnp.float32)
        size_BS = jax.lax.rsqrt(jnp.mean(jnp.square(wide_NBSE), axis=(0, 3)) + 1e-6)
        token_JBS = contract("NBSE,NEJ->JBS", x_NBSE, connection.token).astype(jnp.float32)
        token_JBS = token_JBS * size_BS * connection.scale.astype(jnp.float32)[:, None, None]

        def logits(static: jax.Array, first: int) -> jax.Array:
            own = token_JBS[first : first + static.size].reshape(*static.shape, *size_BS.shape)
            return static.astype(jnp.float32)[..., None, None] + own

        read_NBS = jax.nn.sigmoid(logits(connection.read, 0))
        write_NBS = 2.0 * jax.nn.sigmoid(logits(connection.write, N))
        mix_NMBS = doubly_stochastic(logits(connection.mix, 2 * N), self.iterations)
        y_BSE = branch(jnp.sum(read_NBS[..., None] * wide_NBSE, axis=0).astype(dtype)).astype(jnp.float32)
        mixed_NBSE = jnp.sum(mix_NMBS[..., None] * wide_NBSE, axis=1)
        return (mixed_NBSE + write_NBS[..., None] * y_BSE).astype(dtype)

    def flops_per_token(self, sequence: int) -> float:
        """Return 6 per weight that multiplies, plus causal attention. Mixing streams is not a matrix product."""
        weights = count([leaf for leaf in jax.tree.leaves(self.specs().blocks) if leaf.decay])
        attending = 12.0 * self.layers * self.embed * sequence / 2
        # A token of a stream: 2 matrices with a gradient, and one in each iteration of both passes.
        playing = self.streams * self.embed**2 * (12.0 + 4.0 * (self.equilibrium + 1)) if self.equilibrium else 0.0
        return 6.0 * (weights + self.vocab * self.embed) + attending + playing
