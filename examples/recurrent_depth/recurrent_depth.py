"""A recurrent-depth language model: one small stack of layers, run many times over two states.

In each of `high_cycles` rounds, the layers update a low state `low_cycles` times, with the tokens added each time. Then
they update a high state once with the result. Only the last `trained_cycles` rounds have a gradient; the earlier rounds
need a forward pass and keep no activations. forerun needs no other file to train, plan and check the model.

Dimensions: B batch, S sequence, E embed, H heads, D head, F mlp, V vocab, L layers of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.models.base import Readout
from forerun.nn import layers
from forerun.nn.attention import attention, cached_attention
from forerun.nn.compute import Compute, residual
from forerun.nn.kv_cache import Cache
from forerun.nn.rope import Angles, Rope, angles, rotate
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense, contract

T = TypeVar("T")
Layer = Callable[[jax.Array, "Block[jax.Array]"], jax.Array]
States = tuple[jax.Array, jax.Array]  # high, low: each [B, S, E]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # queries, keys, values: each [B, S, H, D]
Carry = tuple[jax.Array, jax.Array]  # a state and the number of the pass
NewTokens = tuple[jax.Array, jax.Array]  # keys and values of new tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block(Generic[T]):
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    out: Dense[T]
    attention_norm: T
    gate: Dense[T]
    up: Dense[T]
    down: Dense[T]
    mlp_norm: T


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    embed: T  # also the read-out
    high: T  # frozen: the initial high state of every position
    low: T  # frozen, like `high`: no gradient reaches it through the rounds without one
    blocks: Block[T]  # every leaf with a leading L


@dataclass(frozen=True)
class RecurrentDepth:
    """The model. forerun passes `vocab`; the other fields come from the job's `model.options`."""

    vocab: int
    embed: int = 128
    heads: int = 4
    layers: int = 2
    mlp: int = 384
    high_cycles: int = 3
    low_cycles: int = 3
    trained_cycles: int = 1  # how many of the last high cycles have a gradient
    theta: float = 10_000.0

    def __post_init__(self) -> None:
        if self.embed % (2 * self.heads):
            raise TypeError(f"embed {self.embed} is not an even number of dimensions for each of {self.heads} heads")
        if not 1 <= self.trained_cycles <= self.high_cycles or self.low_cycles < 1:
            raise TypeError(f"trained_cycles {self.trained_cycles} must be 1 to high_cycles {self.high_cycles}")

    def specs(self) -> Params[ParamSpec]:
        V, E, H, F = self.vocab, self.embed, self.heads, self.mlp
        D = E // H
        wide, passes = Normal(1 / math.sqrt(E)), 2 * self.layers * (self.low_cycles + 1)
        back = 1 / math.sqrt(passes)  # all branches of a round together add as much as its input
        one = ParamSpec((E,), "E", Fill(1.0), decay=False)
        start = ParamSpec((E,), "E", Normal(1.0), trainable=False)
        block = Block(
            query=Dense(ParamSpec((E, H, D), "EHD", wide)),
            key=Dense(ParamSpec((E, H, D), "EHD", wide)),
            value=Dense(ParamSpec((E, H, D), "EHD", wide)),
            out=Dense(ParamSpec((H, D, E), "HDE", Normal(back / math.sqrt(E)), inputs=2)),
            attention_norm=one,
            gate=Dense(ParamSpec((E, F), "EF", wide)),
            up=Dense(ParamSpec((E, F), "EF", wide)),
            down=Dense(ParamSpec((F, E), "FE", Normal(back / math.sqrt(F)))),
            mlp_norm=one,
        )
        return Params(ParamSpec((V, E), "VE", Normal(1 / math.sqrt(E))), start, start, stack(block, self.layers))

    def apply(
        self,
        params: Params[jax.Array],
        tokens_BS: jax.Array,
        segments_BS: jax.Array,
        positions_BS: jax.Array,
        compute: Compute,
    ) -> Readout:
        x_BSE = self.embedded(params, tokens_BS, compute)
        turns = angles(Rope(self.theta, self.embed // self.heads), positions_BS, segments_BS)

        def attend(q_BSHD: jax.Array, k_BSHD: jax.Array, v_BSHD: jax.Array) -> jax.Array:
            return attention(q_BSHD, k_BSHD, v_BSHD, segments_BS, window=None, kernel=compute.attention)

        def layer(x_BSE: jax.Array, block: Block[jax.Array]) -> jax.Array:
            return self.block(block, x_BSE, turns, attend)

        states = self.start(params, x_BSE)
        still = jax.lax.stop_gradient((params.blocks, x_BSE))
        states = self.rounds(self.high_cycles - self.trained_cycles, layer, states, *still)
        states = jax.lax.stop_gradient(states)
        high_BSE, _ = self.rounds(self.trained_cycles, compute.checkpointed(layer), states, params.blocks, x_BSE)
        return Readout(high_BSE, Dense(params.embed).matrix("VE", compute.dtype))

    def embedded(self, params: Params[jax.Array], tokens_BS: jax.Array, compute: Compute) -> jax.Array:
        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        return x_BSE * jnp.asarray(math.sqrt(self.embed), compute.dtype)

    def start(self, params: Params[jax.Array], x_BSE: jax.Array) -> States:
        """Return the initial states, which are the same at every token."""

        def started(vector_E: jax.Array) -> jax.Array:
            return constrain(jnp.broadcast_to(vector_E.astype(x_BSE.dtype), x_BSE.shape), "BSE")

        return started(params.high), started(params.low)

    def rounds(self, times: int, layer: Layer, states: States, blocks: Block[jax.Array], x_BSE: jax.Array) -> States:
        """Return the states after `times` rounds. Both share the layers; each low cycle adds the tokens again."""

        def stacked(x_BSE: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda x, block: (layer(x, block), None), x_BSE, blocks)[0]

        def cycle(states: States, _: None) -> tuple[States, None]:
            high_BSE, low_BSE = states
            context_BSE = high_BSE + x_BSE
            low_BSE, _ = jax.lax.scan(
                lambda low, _: (stacked(low + context_BSE), None), low_BSE, None, length=self.low_cycles
            )
            return (stacked(high_BSE + low_BSE), low_BSE), None

        return jax.lax.scan(cycle, states, None, length=times)[0]

    def cache(self, rows: int, length: int, dtype: Any) -> Cache[ParamSpec]:
        """Return the specs of the cache. Every pass over a layer has keys and values of its own."""
        passes = self.high_cycles * (self.low_cycles + 1) * self.layers
        return Cache.specs(passes, rows, length, self.heads, self.embed // self.heads, dtype)

    def extend(
        self,
        params: Params[jax.Array],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Cache[jax.Array],
        compute: Compute,
    ) -> tuple[Readout, Cache[jax.Array]]:
        """Return the read-out at the new tokens, and the cache with their keys and values.

        All rounds run for the new tokens only: no state of an earlier token depends on them.
        """
        x_BTE = self.embedded(params, tokens_BT, compute)
        turns = angles(Rope(self.theta, self.embed // self.heads), positions_BT, jnp.ones_like(positions_BT))

        def layer(carry: Carry, block: Block[jax.Array]) -> tuple[Carry, NewTokens]:
            x_BTE, number = carry
            new: list[NewTokens] = []

            def attend(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
                new.append((k_BTHD, v_BTHD))
                return cached_attention(q_BTHD, k_BTHD, v_BTHD, cache.layer(number), positions_BT, window=None)

            return (self.block(block, x_BTE, turns, attend), number + 1), new[0]

        def cycle(carry: tuple[States, jax.Array], _: None) -> tuple[tuple[States, jax.Array], NewTokens]:
            (high_BTE, low_BTE), number = carry
            context_BTE = high_BTE + x_BTE

            def lower(carry: Carry, _: None) -> tuple[Carry, NewTokens]:
                low_BTE, number = carry
                return jax.lax.scan(layer, (low_BTE + context_BTE, number), params.blocks)

            (low_BTE, number), first = jax.lax.scan(lower, (low_BTE, number), None, length=self.low_cycles)
            (high_BTE, number), last = jax.lax.scan(layer, (high_BTE + low_BTE, number), params.blocks)
            new = jax.tree.map(lambda one, other: jnp.concatenate((one, other[None])), first, last)
            return ((high_BTE, low_BTE), number), new

        start = (self.start(params, x_BTE), jnp.int32(0))
        ((high_BTE, _), _), new = jax.lax.scan(cycle, start, None, length=self.high_cycles)
        k_LBTHD, v_LBTHD = (x.reshape(-1, *x.shape[3:]) for x in new)  # from rounds, passes and layers
        after = cache.with_tokens(positions_BT, k_LBTHD, v_LBTHD, after_BTE=high_BTE)
        return Readout(high_BTE, Dense(params.embed).matrix("VE", compute.dtype)), after

    def block(self, block: Block[jax.Array], x_BSE: jax.Array, turns: Angles, attend: Attend) -> jax.Array:
        """Return the output of one layer. A norm after each sum keeps the state from growing over the rounds."""
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")
        q_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.query), turns), "query")
        k_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.key), turns), "key")
        v_BSHD = residual(contract("BSE,EHD->BSHD", x_BSE, block.value), "value")
        y_BSHD = attend(q_BSHD, k_BSHD, v_BSHD)
        y_BSE = contract("BSHD,HDE->BSE", constrain(y_BSHD, "BSHD"), block.out)
        x_BSE = layers.rms_norm(x_BSE + y_BSE, block.attention_norm, 1e-5)

        gate_BSF = residual(contract("BSE,EF->BSF", x_BSE, block.gate), "mlp_gate")
        up_BSF = residual(contract("BSE,EF->BSF", x_BSE, block.up), "mlp_up")
        y_BSE = contract("BSF,FE->BSE", jax.nn.silu(gate_BSF) * up_BSF, block.down)
        return layers.rms_norm(x_BSE + y_BSE, block.mlp_norm, 1e-5)

    def flops_per_token(self, sequence: int) -> float:
        """Return FLOPs per token. A pass without a gradient needs a third of a trained pass; attention is causal."""
        weights = count([leaf for leaf in jax.tree.leaves(self.specs().blocks) if leaf.decay])
        forward = 2.0 * weights + 4.0 * self.layers * self.embed * sequence / 2
        thirds = self.high_cycles + 2 * self.trained_cycles
        return forward * (self.low_cycles + 1) * thirds + 6.0 * self.vocab * self.embed
