"""A tiny model on any mesh, and its log-probabilities by numpy, one row at a time: the oracle of these tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig, Gpt2Config
from forerun.models.gpt2 import Gpt2
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.program.build import make_mesh

VOCAB, POSITIONS = 64, 100
ONE, EIGHT = MeshShape(1, 1, 1), MeshShape(2, 2, 2)
MODELS: dict[str, Model] = {
    "decoder": Decoder(DecoderConfig(2, 32, 4, 2, 8, 48, VOCAB, window=40, qk_norm=True, logit_softcap=8.0)),
    "gpt2": Gpt2(Gpt2Config(2, 32, 4, 64, VOCAB, POSITIONS)),
}


@cache
def weights(name: str) -> Any:
    """Random and large, so that tokens depend on what came before them."""
    arrays = spec.initial(MODELS[name].specs(), jax.random.key(3))
    return jax.tree.map(lambda x: x if x.ndim < 2 else x * 5, arrays)


def placed(name: str, shape: MeshShape) -> tuple[Any, Any]:
    """(weights as they are stored, mesh)."""
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    where = spec.map_specs(lambda s: stored(mesh, s.shape, s.axes), MODELS[name].specs())
    return jax.device_put(weights(name), where), mesh


@cache
def _apply(name: str) -> Any:
    def logits(params: Any, tokens: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return MODELS[name].apply(params, tokens, segments, positions, Compute()).logits()

    return jax.jit(logits)


def logprobs(name: str, tokens: list[int]) -> np.ndarray:
    """[S, V]: of whatever follows each token, in float64. One row; what stands behind it is not seen by it."""
    row = np.zeros((1, POSITIONS), np.int32)
    row[0, : len(tokens)] = tokens
    positions = np.arange(POSITIONS, dtype=np.int32)[None]
    logits = np.asarray(_apply(name)(weights(name), row, np.ones_like(row), positions))[0, : len(tokens)]
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
