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
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.models.base import Readout
from forerun.nn import layers
from forerun.nn.attention import attention
from forerun.nn.compute import Compute, residual
from forerun.nn.rope import Angles, Rope, angles, rotate
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec, count, stack
from forerun.nn.weights.dense import Dense, contract

T = TypeVar("T")
Layer = Callable[[jax.Array, "Block[jax.Array]"], jax.Array]
States = tuple[jax.Array, jax.Array]  # high, low: each [B, S, E]


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
        x_BSE = layers.embed(params.embed, tokens_BS, compute.dtype)
        x_BSE = x_BSE * jnp.asarray(math.sqrt(self.embed), compute.dtype)
        turns = angles(Rope(self.theta, self.embed // self.heads), positions_BS, segments_BS)

        def layer(x_BSE: jax.Array, block: Block[jax.Array]) -> jax.Array:
            return self.block(block, x_BSE, turns, segments_BS, compute)

        def started(vector_E: jax.Array) -> jax.Array:
            return constrain(jnp.broadcast_to(vector_E.astype(compute.dtype), x_BSE.shape), "BSE")

        states = (started(params.high), started(params.low))
        still = jax.lax.stop_gradient((params.blocks, x_BSE))
        states = self.rounds(self.high_cycles - self.trained_cycles, layer, states, *still)
        states = jax.lax.stop_gradient(states)
        high_BSE, _ = self.rounds(self.trained_cycles, compute.checkpointed(layer), states, params.blocks, x_BSE)
        return Readout(high_BSE, Dense(params.embed).matrix("VE", compute.dtype))

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

    def block(
        self, block: Block[jax.Array], x_BSE: jax.Array, turns: Angles, segments_BS: jax.Array, compute: Compute
    ) -> jax.Array:
        """Return the output of one layer. A norm after each sum keeps the state from growing over the rounds."""
        x_BSE = residual(constrain(x_BSE, "BSE"), "layer_in")
        q_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.query), turns), "query")
        k_BSHD = residual(rotate(contract("BSE,EHD->BSHD", x_BSE, block.key), turns), "key")
        v_BSHD = residual(contract("BSE,EHD->BSHD", x_BSE, block.value), "value")
        y_BSHD = attention(q_BSHD, k_BSHD, v_BSHD, segments_BS, window=None, kernel=compute.attention)
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
