"""The examples generate with a cache: the same tokens and logits as without it, at a fraction of the work."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_plugin_models import product_flops

from forerun.config.load import load
from forerun.generate.engine import Chooser, Engine, Settings, UncachedModel
from forerun.generate.sampling import Sampling
from forerun.generate.stream import Stream
from forerun.hardware.mesh import MeshShape
from forerun.models.base import Model, capabilities_of
from forerun.models.model_facts import model_of
from forerun.nn.compute import Compute
from forerun.nn.sharding import stored
from forerun.nn.spec import initial, map_specs
from forerun.program.build import make_mesh

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VOCAB, CHUNK = 61, 64
TINY: dict[str, dict[str, Any]] = {
    "reservoir": {"units": 24, "embed": 16, "mlp": 32},
    "recurrent_depth": {"embed": 16, "heads": 2, "mlp": 24, "high_cycles": 2, "low_cycles": 2},
    "multi_stream": {"embed": 16, "heads": 2, "layers": 2, "mlp": 24, "streams": 3, "off": 1.0},
    "multi_stream equilibrium": {"embed": 16, "heads": 2, "layers": 2, "mlp": 24, "streams": 3, "equilibrium": 8},
}
LENGTHS = (CHUNK, 3, 2 * CHUNK + 10, CHUNK + 1)  # prompts that end with a chunk, inside one, and with its first token
TOKENS = 12
ONE = MeshShape(1, 1, 1)


@pytest.fixture(autouse=True)
def _examples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TINY:
        monkeypatch.syspath_prepend(str(EXAMPLES / name.partition(" ")[0]))
    monkeypatch.setattr("forerun.generate.engine.CHUNK", CHUNK)


def tiny(name: str) -> Model:
    section = load(EXAMPLES / name.partition(" ")[0] / "job.yaml").job.model
    return model_of(section.model_copy(update={"vocab": VOCAB, "options": TINY[name]}))


@cache
def weights(name: str) -> Any:
    """Random and large, so that tokens depend on what came before them."""
    arrays = initial(tiny(name).specs(), jax.random.key(3))
    random = np.random.default_rng(1)

    def shaken(x: jax.Array) -> jax.Array:
        return x + jnp.asarray(random.normal(0, 0.3, x.shape), x.dtype)

    return jax.tree.map(shaken, arrays)


def engine(name: str, *, cached: bool, shape: MeshShape = ONE) -> Engine:
    model, mesh = tiny(name), make_mesh(shape, jax.devices()[: shape.devices])
    params = jax.device_put(weights(name), map_specs(lambda s: stored(mesh, s.shape, s.axes), model.specs()))
    return Engine(model if cached else UncachedModel(model), params, mesh, Compute(), frozenset(), VOCAB)


def prompts(*lengths: int) -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(0, VOCAB, length).tolist() for length in lengths]


def generated(engine: Engine) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in LENGTHS]
    for step in Stream(engine, prompts(*LENGTHS), Settings(TOKENS, Sampling(temperature=0))):
        for row, token in zip(rows, step, strict=True):
            assert token is not None
            row.append(token)
    return rows


@pytest.mark.parametrize("name", TINY)
def test_cached_tokens_are_those_without_a_cache(name: str) -> None:
    assert capabilities_of(tiny(name)).has_cache
    expected = generated(engine(name, cached=False))
    assert len({tuple(row) for row in expected}) == len(LENGTHS), "the rows must differ to prove anything"
    assert generated(engine(name, cached=True)) == expected


@pytest.mark.parametrize("name", ["reservoir", "multi_stream"])
def test_cached_tokens_are_the_same_on_eight_devices(name: str) -> None:
    rows = generated(engine(name, cached=True, shape=MeshShape(2, 2, 2)))
    assert rows == generated(engine(name, cached=True))


@pytest.mark.parametrize("name", TINY)
def test_cached_logits_are_those_of_the_complete_text(name: str) -> None:
    """A prompt of 7 tokens, padding, then one token at a time: the logits of `apply` at every position."""
    model, params = tiny(name), weights(name)
    text = np.asarray(prompts(12, 12), np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), text.shape)
    expected = jax.jit(lambda p: model.apply(p, text, jnp.ones_like(text), positions, Compute()).logits())(params)
    extend: Any = jax.jit(lambda p, *given: _extended(model, p, *given))
    held = map_specs(lambda s: jnp.zeros(s.shape, s.dtype), model.cache(2, 16, jnp.float32))  # type: ignore[attr-defined]
    padded = np.concatenate((text[:, :7], np.zeros((2, 3), np.int32)), axis=1)
    first, held = extend(params, padded, np.minimum(np.arange(10, dtype=np.int32), 6) + 0 * padded, held)
    found = [first[:, :7]]
    for n in range(7, 12):
        one, held = extend(params, text[:, n : n + 1], positions[:, n : n + 1], held)
        found.append(one)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def _extended(model: Any, params: Any, tokens: jax.Array, positions: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    out, cache = model.extend(params, tokens, positions, cache, Compute())
    return out.logits(), cache


@pytest.mark.parametrize("name", TINY)
def test_a_cached_token_needs_a_small_part_of_the_work(name: str) -> None:
    """FLOPs of all matrix products for one more token after 511."""
    model: Any = tiny(name)
    one = jnp.ones((1, 1), jnp.int32)

    def flops(model: Any) -> float:
        held = map_specs(lambda s: jnp.zeros(s.shape, s.dtype), model.cache(1, 512, jnp.float32))
        return product_flops(jax.make_jaxpr(lambda p: _extended(model, p, one, 511 * one, held))(weights(name)).jaxpr)

    assert flops(model) < 0.05 * flops(UncachedModel(model))


def test_a_row_that_has_ended_keeps_its_state() -> None:
    """The padding after a short prompt must not change the state, although the next chunk starts at its length."""
    one = engine("reservoir", cached=True)
    chooser = Chooser(one, Settings(1, Sampling(temperature=0)), np.zeros(4, np.uint32))
    rows = prompts(*LENGTHS)
    together = np.asarray(one.begin(rows, 4, chooser).cache)
    for number, row in enumerate(rows):
        single = Chooser(one, Settings(1, Sampling(temperature=0)), np.zeros(1, np.uint32))
        alone = np.asarray(one.begin([row], 4, single).cache)
        np.testing.assert_allclose(together[number], alone[0], atol=1e-5)
