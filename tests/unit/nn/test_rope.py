"""Rotary embeddings of long sequences, against float64 and against transformers' frequencies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import RopeScaling
from forerun.nn import rope as module
from forerun.nn.rope import Linear, LongRope, Proportional, Rope, Yarn, angles, frequencies

MILLION = 1 << 20
SMALL = 16  # dimensions: all angles of a million positions then take 32 MiB
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


@pytest.mark.parametrize(
    "rope",
    [
        Rope(500_000.0, SMALL, LLAMA3.scaling),
        Rope(1_000_000.0, SMALL, YARN.scaling),
        Rope(10_000.0, SMALL, Linear(8.0)),
        Rope(10_000.0, SMALL, LongRope((1.0,) * 8, tuple(range(2, 10)), original=4096, attention=1.19)),
        Rope(1_000_000.0, SMALL, Proportional(0.25)),
        Rope(500_000.0, SMALL, LLAMA3.scaling, interleaved=True),
    ],
    ids=["llama3", "yarn", "linear", "longrope", "proportional", "interleaved"],
)
def test_every_position_of_a_million_is_precise(rope: Rope) -> None:
    positions = jnp.arange(MILLION)[None]
    cos, sin = (np.asarray(x)[0, :, 0] for x in angles(rope, positions, jnp.ones_like(positions)))
    factor = rope.scaling.attention if isinstance(rope.scaling, Yarn | LongRope) else 1.0
    each = frequencies(rope, long=True).astype(np.float64)
    exact = np.arange(MILLION)[:, None] * (np.repeat(each, 2) if rope.interleaved else each)
    wanted = np.sin(exact) * np.where(rope.interleaved & (np.arange(exact.shape[1]) % 2 == 0), -1, 1)
    assert np.abs(cos - factor * np.cos(exact)).max() < 5e-4
    assert np.abs(sin - factor * wanted).max() < 5e-4


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_new_tokens_of_a_long_text_are_precise(rope: Rope) -> None:
    """Generation computes the angles of a few tokens. Their positions can be as large as the text is long."""
    chosen = np.array([65_537, 500_001, MILLION - 1])
    positions = jnp.asarray(chosen[:, None], jnp.int32)
    exact = chosen[:, None] * frequencies(rope).astype(np.float64)
    factor = rope.scaling.attention if isinstance(rope.scaling, Yarn) else 1.0

    def error(longest: int) -> float:
        cos, _ = angles(rope, positions, jnp.ones_like(positions), longest=longest)
        return float(np.abs(np.asarray(cos)[:, 0, 0] - factor * np.cos(exact)).max())

    assert error(MILLION) < 5e-4
    assert error(1) > 0.01  # a single float32 product, as for short texts


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
