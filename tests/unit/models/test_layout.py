"""Layers without a scan (`unroll`) compute what a scan computes, in every layout of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.config.schema import Remat
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.models.gpt2 import Gpt2, Gpt2Config
from forerun.models.layer_kinds import LayerKind, LayerShape
from forerun.models.layout import through
from forerun.nn import spec
from forerun.nn.compute import Compute
from forerun.nn.rope import Rope

NEAR, FAR = LayerKind(4, Rope(100.0, 8)), LayerKind(None, Rope(1000.0, 8))
ONE_KIND = DecoderConfig(3, 16, 4, 2, 8, 24, 50, qk_norm=True)
# Two periods of two local layers and a global one, a tail of one layer, and a last layer of another pattern.
PERIODS = DecoderConfig(8, 16, 4, 2, 8, 24, 50, kinds=(NEAR, NEAR, FAR), last_layers=1, last_kinds=(FAR,))
SHAPES = replace(
    PERIODS,
    kinds=(
        replace(NEAR, shape=LayerShape("sliding")),
        replace(FAR, rope=Rope(1000.0, 12), shape=LayerShape("full", kv_heads=1, head_dim=12, mlp=40)),
    ),
    last_layers=0,
    last_kinds=(),
)
MODELS = {
    "one kind": Decoder(ONE_KIND),
    "periods and tail": Decoder(PERIODS),
    "shapes": Decoder(SHAPES),
    "gpt2": Gpt2(Gpt2Config(3, 16, 4, 32, 50, 8)),
}


def lowered(model: Any, remat: Remat, *, unroll: bool) -> tuple[Any, Any]:
    """Return the lowered program of a loss (the mean of all logits squared) and its gradient, and the parameters."""
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 50)
    segments, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(8), (2, 8))
    params = spec.initial(model.specs(), jax.random.key(0))

    def loss(params: Any) -> jax.Array:
        read = model.apply(params, tokens, segments, positions, Compute(remat=remat, unroll=unroll))
        return jnp.mean(read.logits() ** 2)

    return jax.jit(jax.value_and_grad(loss)).lower(params), params


def losses(model: Any, remat: Remat, *, unroll: bool) -> tuple[np.ndarray, Any, str]:
    """Return the loss, its gradient, and the program's text."""
    program, params = lowered(model, remat, unroll=unroll)
    return *program.compile()(params), program.as_text()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(pytest.param(name, "full", marks=pytest.mark.slow) for name in MODELS),
        ("one kind", "none"),
        ("one kind", "dots"),
        ("gpt2", "none"),
    ],
)
def test_unrolled_layers_have_equal_loss_and_gradients(name: str, policy: Any) -> None:
    scanned, its_gradient, loop = losses(MODELS[name], Remat(policy=policy), unroll=False)
    unrolled, gradient, straight = losses(MODELS[name], Remat(policy=policy), unroll=True)
    np.testing.assert_allclose(unrolled, scanned, rtol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(its_gradient)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(its_gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-6)
    assert ("while" in loop, "while" in straight) == (True, False)


def test_named_residuals_are_kept_without_a_scan() -> None:
    """With every residual kept, the backward pass computes fewer matmuls than with none."""

    def matmuls(*keep: str) -> int:
        program, _ = lowered(MODELS["one kind"], Remat(policy="named", keep=keep), unroll=True)
        return program.as_text().count("dot_general")

    assert matmuls("query", "key", "value", "attention_out") < matmuls("layer_in")


def test_outputs_of_layers_are_stacked_as_by_a_scan() -> None:
    weights = jnp.arange(6.0).reshape(6, 1)

    def add(carry: Any, weight: Any) -> tuple[Any, Any]:
        return carry + weight, carry * 10

    def subtract(carry: Any, weight: Any) -> tuple[Any, Any]:
        return carry - weight, carry * 100

    for steps in ([add], [add, subtract], [add, add, subtract]):
        start = jnp.ones(1)
        carry, outputs = through(steps, start, weights, unroll=True)
        expected_carry, expected = through(steps, start, weights)
        np.testing.assert_array_equal(carry, expected_carry)
        np.testing.assert_array_equal(outputs, expected)
