from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scored_models as tiny
from error_assertions import raises_error

from forerun.evaluate.perplexity import HeldOutText, held_out
from forerun.hardware.mesh import MeshShape
from forerun.nn.compute import Compute
from forerun.objectives.batch import Batch

SEQUENCE = 24


def batch(*rows: list[int]) -> Batch[np.ndarray]:
    """One document per row; rows that are too short are filled up."""
    arrays = {
        name: np.zeros((len(rows), SEQUENCE), np.int32) for name in ("tokens", "targets", "segments", "positions")
    }
    weights = np.zeros((len(rows), SEQUENCE), np.float32)
    for place, row in enumerate(rows):
        count = max(0, len(row) - 1)
        arrays["tokens"][place, :count], arrays["targets"][place, :count] = row[:-1], row[1:]
        arrays["segments"][place, :count], arrays["positions"][place, :count] = 1, np.arange(count)
        weights[place, :count] = 1
    return Batch(weights=weights, **arrays)


ROWS = [tiny.some_tokens(length, seed) for seed, length in enumerate((25, 20, 3, 25, 9, 25))]
BATCHES = [batch(*ROWS[:4]), batch(*ROWS[4:], [], [])]


@pytest.mark.parametrize("shape", [tiny.ONE, tiny.EIGHT], ids=str)
def test_loss_is_the_mean_over_all_tokens(shape: MeshShape) -> None:
    params, mesh = tiny.placed("decoder", shape)
    found = held_out(tiny.MODELS["decoder"], params, mesh, Compute(), BATCHES, text_bytes=200)
    nats = [-tiny.logprobs("decoder", row[:-1])[place, token] for row in ROWS for place, token in enumerate(row[1:])]
    assert found.tokens == len(nats) == 101
    assert found.loss == pytest.approx(np.mean(nats), abs=1e-5)
    assert found.perplexity == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(np.sum(nats) / np.log(2) / 200, rel=1e-5)


def test_a_loss_beyond_all_numbers_has_an_infinite_perplexity() -> None:
    assert HeldOutText(nats=1e6, tokens=10, text_bytes=10).perplexity == math.inf


def test_what_cannot_be_measured_is_said() -> None:
    params, mesh = tiny.placed("decoder", tiny.ONE)
    model = tiny.MODELS["decoder"]
    with raises_error("E-EVAL-005"):
        held_out(model, params, mesh, Compute(), [batch([], [])], text_bytes=1)
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with raises_error("E-EVAL-004"):
        held_out(model, broken, mesh, Compute(), [batch(ROWS[0])], text_bytes=1)
