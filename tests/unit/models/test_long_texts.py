"""Generation at positions up to a million: keys that `extend` stores, against a rotation in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import RopeScaling
from forerun.models.decoder import Decoder
from forerun.models.sizes import DecoderConfig
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.kv_cache import LayerCaches, RecurrentCache
from forerun.nn.rope import Rope, Scaling, Yarn, frequencies
from forerun.nn.spec import Fill, ParamSpec

MILLION = 1 << 20
LLAMA3 = RopeScaling(factor=8.0, low=1.0, high=4.0, original=8192)
YARN = Yarn(factor=32.0, original=32_768, attention=1.3465735902799727)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_keys_of_late_tokens(scaling: Scaling) -> None:
    """The key of a token at position 0 is not rotated, so the one at a late position must be its rotation."""
    config = DecoderConfig(
        layers=1, embed=16, heads=2, kv_heads=1, head_dim=16, mlp=16, vocab=8, rope_theta=5e5, rope_scaling=scaling
    )
    model = Decoder(config)
    numbers = np.random.default_rng(0)
    params = spec.map_specs(lambda s: jnp.asarray(numbers.normal(size=s.shape), jnp.float32), model.specs())
    specs = model.cache(1, MILLION, jnp.float32)

    @jax.jit
    def extend(place: jax.Array) -> Any:
        cache = spec.map_specs(lambda s: jnp.zeros(s.shape, s.dtype), specs)
        tokens = jnp.asarray([[3]])
        _, after = model.extend(params, tokens, jnp.full_like(tokens, place), cache, Compute())
        return after.keys[0, 0, 0, place]

    factor = scaling.attention if isinstance(scaling, Yarn) else 1.0
    plain = np.asarray(extend(0), np.float64) / factor
    each = frequencies(Rope(5e5, 16, scaling)).astype(np.float64)
    first, second = np.split(plain, 2)
    for place in (65_537, 131_071, 777_777, MILLION - 1):
        cos, sin = factor * np.cos(place * each), factor * np.sin(place * each)
        wanted = np.concatenate((first * cos - second * sin, second * cos + first * sin))
        np.testing.assert_allclose(extend(place), wanted, rtol=0, atol=1e-3 * np.abs(plain).max())


def test_slots() -> None:
    keys = ParamSpec((2, 1, 3, 20, 8), "LBKSD", Fill(0.0))
    caches = Decoder(DecoderConfig(2, 16, 2, 1, 8, 16, 8)).cache(1, 20, jnp.float32)
    arrays = spec.map_specs(lambda s: jnp.zeros(s.shape, s.dtype), caches)
    apart = spec.map_specs(lambda s: jnp.zeros(s.shape, s.dtype), caches.apart())
    recurrent = RecurrentCache({"state": jnp.zeros((1, 1, 4))})
    assert (
        keys.shape[-2] == arrays.slots == apart.slots == LayerCaches({"full": arrays, "delta": recurrent}).slots == 20
    )
    assert LayerCaches({"delta": recurrent}).slots == 0
