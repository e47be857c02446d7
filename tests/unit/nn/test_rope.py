"""Rotary embeddings of long sequences, against float64 and against transformers' frequencies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import RopeScaling
from forerun.nn import rope as module
from forerun.nn.rope import Rope, Yarn, angles, frequencies

MILLION = 1 << 20
LLAMA3 = Rope(500_000.0, 128, RopeScaling(factor=8.0, low=1.0, high=4.0, original=8192))
YARN = Rope(1_000_000.0, 128, Yarn(factor=4.0, original=32768, attention=1.1386294361119891))


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_angles_of_a_million_positions_are_those_of_float64(rope: Rope, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 16 positions and some others. A plain float32 product is wrong by more than 0.01 radians there."""
    chosen = np.array([0, 1, 1023, 1024, 65535, 500_001, *range(MILLION - 16, MILLION)])
    positions = jnp.asarray(chosen[None], jnp.int32)

    def found() -> list[np.ndarray]:
        return [np.asarray(x)[0, :, 0] for x in angles(rope, positions, jnp.ones_like(positions))]

    short = found()
    monkeypatch.setattr(module, "SPLIT_POSITIONS", 8)  # a row of a million angles takes half a gibibyte
    long = found()
    factor = rope.scaling.attention if isinstance(rope.scaling, Yarn) else 1.0
    exact = chosen[:, None].astype(np.float64) * frequencies(rope).astype(np.float64)
    np.testing.assert_allclose(long[0], factor * np.cos(exact), rtol=0, atol=5e-4)
    np.testing.assert_allclose(long[1], factor * np.sin(exact), rtol=0, atol=5e-4)
    assert np.abs(short[0] - factor * np.cos(exact)).max() > 0.01


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rope", "kind", "scaling"),
    [
        (
            LLAMA3,
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (YARN, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ],
    ids=["llama3", "yarn"],
)
def test_frequencies_are_those_of_transformers(rope: Rope, kind: str, scaling: dict[str, Any]) -> None:
    """At a million positions, a relative difference of 1e-7 is an angle of 0.1. Here both have the same float32."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": rope.theta, **scaling},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    np.testing.assert_allclose(frequencies(rope), wanted.numpy(), rtol=3e-7)
    assert factor == pytest.approx(rope.scaling.attention if isinstance(rope.scaling, Yarn) else 1.0)
