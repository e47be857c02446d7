"""Two models small enough to recompute every token from scratch, and the recomputation: the oracle of these tests."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from forerun.generate.engine import Engine, Settings
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.gpt2 import Gpt2
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.program.build import make_mesh

VOCAB = 61  # of the tokenizer; the models have a few more ids
POSITIONS = 100
GREEDY = Sampling(temperature=0)
ONE, EIGHT = MeshShape(1, 1, 1), MeshShape(2, 2, 2)
MODELS: dict[str, Model] = {
    "decoder": Decoder(DecoderConfig(2, 32, 4, 2, 8, 48, 64, window=40, qk_norm=True)),
    "gpt2": Gpt2(Gpt2Config(2, 32, 4, 64, 64, POSITIONS)),
}


@cache
def weights(name: str) -> Any:
    """Random and large, so that tokens depend on what came before them."""
    arrays = spec.initial(MODELS[name].specs(), jax.random.key(3))
    return jax.tree.map(lambda x: x if x.ndim < 2 else x * 12, arrays)


@cache
def engine(name: str, shape: MeshShape, eos: frozenset[int] = frozenset()) -> Engine:
    return fresh_engine(name, shape, eos)


def fresh_engine(name: str, shape: MeshShape, eos: frozenset[int] = frozenset()) -> Engine:
    model, mesh = MODELS[name], make_mesh(shape, jax.devices()[: shape.devices])
    where = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), model.specs())
    return Engine(model, jax.device_put(weights(name), where), mesh, Compute(), eos, VOCAB)


def prompts(*lengths: int) -> list[list[int]]:
    """Of some, these: the likeliest two tokens are never so near that weights changed by 1e-5 choose the other one."""
    numbers = np.random.default_rng(5)
    return [numbers.integers(0, VOCAB, length).tolist() for length in lengths]


def generated(engine: Engine, rows: list[list[int]], settings: Settings, first_row: int = 0) -> list[list[int]]:
    steps = list(Stream(engine, rows, settings, first_row=first_row))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(rows))]


@cache
def _logits(name: str) -> Any:
    def all_logits(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return MODELS[name].apply(params, tokens, jnp.ones_like(tokens), positions, Compute()).logits()

    return jax.jit(all_logits)


def recomputed(name: str, prompt: list[int], count: int, length: int = 256) -> list[int]:
    """The likeliest next token by a whole forward pass, `count` times. Nothing later than a token is seen by it."""
    ids = list(prompt)
    length = min(length, POSITIONS) if name == "gpt2" else length
    for _ in range(count):
        window = np.zeros((1, length), np.int32)
        window[0, : len(ids)] = ids
        logits = np.asarray(_logits(name)(weights(name), window))[0, len(ids) - 1, :VOCAB]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


settings = partial(Settings, sampling=GREEDY)
