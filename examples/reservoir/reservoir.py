"""A reservoir language model: a fixed random recurrent network with a trained read-out.

The reservoir turns the past of each position into a vector of features. It is not trained, so there is no
backpropagation through time and no activation of it is kept; only the read-out has a backward pass. forerun needs
no other file to train, plan and check the model.

Dimensions: B batch, T time (the sequence, never split over devices), E embed, N reservoir units, M the same units as
outputs of the recurrent matrix, F mlp, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp

from forerun.models.base import Readout
from forerun.nn import layers
from forerun.nn.compute import Compute, residual
from forerun.nn.sharding import constrain
from forerun.nn.spec import Fill, Normal, ParamSpec
from forerun.nn.weights.dense import Dense, contract

T = TypeVar("T")


@dataclass(frozen=True)
class Sparse:
    """An initializer for a sparse random matrix with a given spectral radius and share of nonzero entries.

    By the circular law, the eigenvalues of an n x n matrix of independent entries fill a disc of radius
    std x sqrt(n), whatever the distribution of the entries.
    """

    radius: float
    density: float

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        for_values, for_mask = jax.random.split(key)
        kept = jax.random.bernoulli(for_mask, self.density, shape).astype(jnp.float32)
        values = jax.random.normal(for_values, shape, jnp.float32)
        return (values * kept * (self.radius / math.sqrt(shape[0] * self.density))).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params(Generic[T]):
    embed: T  # frozen
    into: Dense[T]  # frozen
    recurrent: Dense[T]  # frozen
    norm: T
    up: Dense[T]
    down: Dense[T]
    head: Dense[T]


@dataclass(frozen=True)
class Reservoir:
    """The model. forerun passes `vocab`; the other fields come from the job's `model.options`."""

    vocab: int
    units: int = 512
    embed: int = 128
    mlp: int = 512
    radius: float = 0.95  # spectral radius of the recurrent matrix: below 1, the state forgets the past
    density: float = 0.2  # share of recurrent weights that are nonzero
    leak_slow: float = 0.1  # units have different speeds: the share of the new state per token, from this one ...
    leak_fast: float = 1.0  # ... to this one, in a geometric sequence

    heads: ClassVar[None] = None  # no attention, so tensor parallelism has no heads to split

    def specs(self) -> Params[ParamSpec]:
        V, E, N, F = self.vocab, self.embed, self.units, self.mlp
        return Params(
            embed=ParamSpec((V, E), "VE", Normal(1.0), trainable=False),
            into=Dense(ParamSpec((E, N), "EN", Normal(1 / math.sqrt(E)), trainable=False)),
            recurrent=Dense(ParamSpec((N, N), "NM", Sparse(self.radius, self.density), trainable=False)),
            norm=ParamSpec((E,), "E", Fill(1.0), decay=False),
            up=Dense(ParamSpec((N, F), "NF", Normal(1 / math.sqrt(N)))),
            down=Dense(ParamSpec((F, E), "FE", Normal(1 / math.sqrt(F)))),
            head=Dense(ParamSpec((V, E), "VE", Normal(0.02), inputs=0)),
        )

    def apply(
        self,
        params: Params[jax.Array],
        tokens_BS: jax.Array,
        segments_BS: jax.Array,
        positions_BS: jax.Array,
        compute: Compute,
    ) -> Readout:
        drive_TBN = self.drive(params, tokens_BS, compute.dtype)
        before_BS = jnp.pad(segments_BS, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        goes_on_TB = (segments_BS == before_BS).T
        tick = self.tick(params, compute.dtype)

        def step(state_BN: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            drive_BN, goes_on_B = now
            state_BN = tick(constrain(jnp.where(goes_on_B[:, None], state_BN, 0.0), "BN"), drive_BN)
            return state_BN, state_BN.astype(compute.dtype)

        start_BN = constrain(jnp.zeros((tokens_BS.shape[0], self.units), jnp.float32), "BN")
        _, states_TBN = jax.lax.scan(step, start_BN, (drive_TBN, goes_on_TB))
        states_BTN = jax.lax.stop_gradient(constrain(jnp.moveaxis(states_TBN, 0, 1), "BTN"))
        return self.readout(params, states_BTN, compute)

    def cache(self, rows: int, length: int, dtype: Any) -> ParamSpec:
        """Return the spec of the cache: the state of each row, whatever the length of its text."""
        return ParamSpec((rows, self.units), "BN", Fill(0.0), jnp.float32)

    def extend(
        self,
        params: Params[jax.Array],
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: jax.Array,
        compute: Compute,
    ) -> tuple[Readout, jax.Array]:
        """Return the read-out at the new tokens, and the state after them.

        Padding repeats the position of the last token, and the state does not change there.
        """
        before_BT = jnp.pad(positions_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        is_token_TB = (positions_BT != before_BT).T
        tick = self.tick(params, compute.dtype)

        def step(state_BN: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            drive_BN, is_token_B = now
            state_BN = jnp.where(is_token_B[:, None], tick(state_BN, drive_BN), state_BN)
            return state_BN, state_BN.astype(compute.dtype)

        drive_TBN = self.drive(params, tokens_BT, compute.dtype)
        state_BN, states_TBN = jax.lax.scan(step, cache, (drive_TBN, is_token_TB))
        return self.readout(params, jnp.moveaxis(states_TBN, 0, 1), compute), state_BN

    def readout(self, params: Params[jax.Array], states_BTN: jax.Array, compute: Compute) -> Readout:
        """Return the trained read-out of the states."""

        def read(states_BTN: jax.Array) -> jax.Array:
            up_BTF = residual(contract("BTN,NF->BTF", states_BTN, params.up), "mlp_up")
            y_BTE = contract("BTF,FE->BTE", jax.nn.gelu(up_BTF), params.down)
            return layers.rms_norm(y_BTE, params.norm, 1e-6)

        return Readout(compute.checkpointed(read)(states_BTN), params.head.matrix("VE", compute.dtype))

    def drive(self, params: Params[jax.Array], tokens_BS: jax.Array, dtype: Any) -> jax.Array:
        """Return the input of each unit at each token, [T, B, N]."""
        drive_BSN = contract("BSE,EN->BSN", layers.embed(params.embed, tokens_BS, dtype), params.into)
        return jnp.moveaxis(constrain(drive_BSN, "BTN"), 1, 0)

    def tick(self, params: Params[jax.Array], dtype: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return a function from a state and an input to the next state, each [B, N].

        The state is float32 and only the product uses `dtype`: bfloat16 would lose the small changes of a slow unit.
        """
        recurrent_NM = params.recurrent.matrix("NM", dtype)
        leak_N = jnp.geomspace(self.leak_slow, self.leak_fast, self.units, dtype=jnp.float32)

        def tick(state_BN: jax.Array, drive_BN: jax.Array) -> jax.Array:
            pull_BN = jnp.einsum("BN,NM->BM", state_BN.astype(dtype), recurrent_NM, preferred_element_type=jnp.float32)
            target_BN = jnp.tanh(pull_BN + drive_BN.astype(jnp.float32))
            return state_BN + leak_N * (target_BN - state_BN)

        return tick

    def flops_per_token(self, sequence: int) -> float:
        """Return 2 per frozen weight, 4 per weight of the first trained layer, and 6 per other weight.

        The first trained layer needs no gradient of its inputs.
        """
        fixed = self.embed * self.units + self.units**2
        first = self.units * self.mlp
        learned = self.mlp * self.embed + self.embed * self.vocab
        return 2.0 * fixed + 4.0 * first + 6.0 * learned
