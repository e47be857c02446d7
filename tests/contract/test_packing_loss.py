"""Packed and separate give the same loss for every token: documents that share a row do not see one another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forerun.data.documents import InMemory, in_memory
from forerun.data.order.whole_documents import WholeDocuments
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.nn import spec
from forerun.nn.compute import Compute

VOCAB, S = 96, 48
TINY = DecoderConfig(
    layers=3, embed=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=VOCAB, qkv_bias=True, qk_norm=True
)
LENGTHS = (7, 20, 3, 31, 12, 2, 49, 18, 9, 25, 120)  # the last two thirds of 120 are pieces of their own


def documents() -> InMemory:
    rng = np.random.default_rng(0)
    return in_memory([rng.integers(0, VOCAB, n) for n in LENGTHS])


def model_and_params() -> tuple[Decoder, Any]:
    rng, model = np.random.default_rng(1), Decoder(TINY)

    def leaf(one: spec.ParamSpec) -> jax.Array:
        return jnp.asarray(rng.normal(0.0 if one.decay else 1.0, 0.3, one.shape), one.dtype)

    return model, spec.map_specs(leaf, model.specs())


def losses(tokens: np.ndarray, targets: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Of every position [B, S], by the definition."""
    model, params = model_and_params()

    @jax.jit
    def each(tokens: jax.Array, targets: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens, segments, positions, Compute()).logits()
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]

    return np.asarray(each(*map(jnp.asarray, (tokens, targets, segments, positions))))


def separately(held: InMemory) -> dict[tuple[int, int], np.ndarray]:
    """(document, piece) -> its losses, each alone in a row: positions from 0, one segment, nothing beside it."""
    pieces = {
        (d, at // S): held.ids[held.offsets[d] + at : min(held.offsets[d] + at + S + 1, held.offsets[d + 1])]
        for d, n in enumerate(LENGTHS)
        for at in range(0, n - 1, S)
    }
    rows = np.zeros((4, len(pieces), S), np.int32)
    for i, ids in enumerate(pieces.values()):
        n = len(ids) - 1
        rows[0, i, :n], rows[1, i, :n], rows[2, i, :n], rows[3, i, :n] = ids[:-1], ids[1:], 1, np.arange(n)
    found = losses(*rows)
    return {key: found[i, : len(ids) - 1] for i, (key, ids) in enumerate(pieces.items())}


def largest_difference(segments_as_packed: bool) -> float:
    held = documents()
    rows = WholeDocuments(held, S)
    taken = rows.take(np.arange(len(rows)))
    segments = taken["segments"] if segments_as_packed else np.minimum(taken["segments"], 1)
    together, alone = losses(taken["tokens"], taken["targets"], segments, taken["positions"]), separately(held)
    assert max(taken["segments"].max(1)) >= 3, "some row holds several documents"
    worst, met = 0.0, 0
    for row in range(len(rows)):
        for number, (document, *piece) in enumerate(rows.examples(row), 1):
            here = together[row][taken["segments"][row] == number]
            there = alone.pop((document, *piece) if piece else (document, 0))  # type: ignore[arg-type]
            assert here.shape == there.shape
            worst = max(worst, float(np.abs(here - there).max()))
            met += len(here)
    assert not alone, "every document and piece stands in some row"
    assert met == sum(LENGTHS) - len(LENGTHS) == taken["weights"].sum()
    return worst


def test_packed_and_separate_give_the_same_loss_for_every_token() -> None:
    assert largest_difference(segments_as_packed=True) < 1e-5


def test_without_segments_they_would_not() -> None:
    assert largest_difference(segments_as_packed=False) > 1e-2


@pytest.mark.parametrize("too_long", ["keep_start", "keep_end", "drop"])
def test_what_is_left_out_is_not_in_the_loss(too_long: Any) -> None:
    rows = WholeDocuments(documents(), S, too_long=too_long)
    kept = sum(min(n - 1, S) if too_long != "drop" or n - 1 <= S else 0 for n in LENGTHS)
    assert rows.take(np.arange(len(rows)))["weights"].sum() == kept == rows.report.learned
