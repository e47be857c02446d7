"""Every family against Hugging Face transformers (torch, float32, eager), on checkpoints that transformers wrote.

Eight rows, padded to the right: four beyond LongRope's original context, three below it, and one of packed documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_reference import FAMILY_EXAMPLES, ORIGINAL, VARIANTS, VOCAB, Pair, pair

from forerun.config.schema import Job, Precision, Remat
from forerun.config.schema import Model as Section
from forerun.hardware.mesh import MeshShape
from forerun.nn import sharding, spec
from forerun.nn.compute import Compute
from forerun.objectives.batch import Batch
from forerun.objectives.next_token import NextToken
from forerun.program.build import build, make_mesh
from forerun.program.derive import derive

LENGTH = 40
LONG, SHORT = (40, 33, 29, 26), (23, 9, 17)
DOCUMENTS = (6, 25, 7)  # packed in the last row, two positions of padding behind them
EVERY = pytest.mark.parametrize("name", VARIANTS)
Note = Callable[[str, str, Any], None]


def rows() -> Batch[np.ndarray]:
    rng = np.random.default_rng(0)
    whole = [(n,) for n in (*LONG, *SHORT)]
    shape = (len(whole) + 1, LENGTH)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, lengths in enumerate([*whole, DOCUMENTS]):
        ends = np.cumsum(lengths)
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True), start=1):
            segments[row, end - length : end], positions[row, end - length : end] = number, np.arange(length)
    drawn = rng.integers(1, VOCAB, (shape[0], LENGTH + 1)).astype(np.int32)  # torch gives padding, 0, no gradient
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)  # the target is of the same document
    counted = np.pad(inside, ((0, 0), (0, 1))) & (rng.random(shape) < 0.7)
    return Batch(drawn[:, :-1], drawn[:, 1:], counted.astype(np.float32), segments, positions)


ROWS = rows()


def reference_logits(one: Pair, tokens_BS: np.ndarray, lengths: tuple[int, ...]) -> Any:
    """Of rows that are padded to the right, as transformers is told: by an attention mask."""
    import torch

    mask = torch.from_numpy(np.arange(tokens_BS.shape[1]) < np.array(lengths)[:, None]).long()
    answer = one.reference(input_ids=torch.from_numpy(tokens_BS).long(), attention_mask=mask, use_cache=False)
    return answer.logits


def all_reference_logits(one: Pair) -> Any:
    """Of all rows, [B, S, V]: long and short ones in batches of their own, and every packed document by itself."""
    import torch

    found = torch.zeros((*ROWS.tokens.shape, VOCAB))
    found[: len(LONG)] = reference_logits(one, ROWS.tokens[: len(LONG)], LONG)
    found[len(LONG) : -1, :ORIGINAL] = reference_logits(one, ROWS.tokens[len(LONG) : -1, :ORIGINAL], SHORT)
    for end, length in zip(np.cumsum(DOCUMENTS), DOCUMENTS, strict=True):
        here = slice(end - length, end)
        found[-1:, here] = reference_logits(one, ROWS.tokens[-1:, here], (length,))
    return found


@cache
def expected_logits(name: str) -> np.ndarray:
    import torch

    with torch.no_grad():
        return all_reference_logits(pair(name)).numpy()


@cache
def our_logits(name: str) -> np.ndarray:
    one = pair(name)
    apply = jax.jit(lambda *arrays: one.model.apply(*arrays, Compute()).logits())
    return np.asarray(apply(one.params, ROWS.tokens, ROWS.segments, ROWS.positions))


@EVERY
@pytest.mark.torch
def test_logits(name: str, families_table: Note) -> None:
    expected, got, real = expected_logits(name), our_logits(name), ROWS.segments > 0
    assert np.std(expected[real]) > 0.5
    difference = float(np.abs(got - expected)[real].max())
    assert difference < 1e-4
    variant, config = VARIANTS[name], pair(name).model.config
    families_table(variant.row, "logits", difference)
    families_table(variant.row, "head", ["tied" if config.tied else "untied"])
    families_table(variant.row, "RoPE scaling", [variant.scaling])


@cache
def expected_loss_and_gradients(name: str) -> tuple[float, Any]:
    import torch

    one = pair(name)
    targets, weights = torch.from_numpy(ROWS.targets).flatten().long(), torch.from_numpy(ROWS.weights).flatten()
    nats = torch.nn.functional.cross_entropy(all_reference_logits(one).flatten(0, 1), targets, reduction="none")
    loss = (nats * weights).sum() / weights.sum()
    loss.backward()
    return loss.item(), one.params_of({key: leaf.grad.numpy() for key, leaf in one.reference.named_parameters()})


def norm_of(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@EVERY
@pytest.mark.torch
def test_gradients_of_the_mean_loss(name: str, families_table: Note) -> None:
    model = pair(name).model
    expected_loss, expected = expected_loss_and_gradients(name)

    def loss(params: Any) -> jax.Array:
        sums = NextToken(chunk=7)(model, params, ROWS, Compute(remat=Remat(policy="none")))
        total, counted = sums.loss, sums.weight
        return total / counted

    value, got = jax.jit(jax.value_and_grad(loss))(pair(name).params)
    np.testing.assert_allclose(value, expected_loss, rtol=1e-5)
    nothing, worst = 1e-6 * norm_of(expected), 0.0
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        if norm_of(want) < nothing:  # GPT-2's bias of keys moves all scores of a query alike
            assert norm_of(have) < nothing
            continue
        error = norm_of(have - want) / norm_of(want)
        assert error < 1e-3, f"{jax.tree_util.keystr(path)}: {error}"
        worst = max(worst, error)
    families_table(VARIANTS[name].row, "gradients", worst)


@EVERY
@pytest.mark.torch
def test_the_cache_gives_the_same_logits(name: str) -> None:
    """Rows of unequal lengths are read in one go, then eight tokens one by one. Against the reference's whole rows.

    None of them grows beyond LongRope's original context on the way: such a row must be read again.
    """
    one, steps, width = pair(name), 8, LENGTH - 8
    extend = jax.jit(lambda *arrays: _logits_and_cache(one, *arrays))
    for first, lengths in ((0, LONG[:2]), (len(LONG), SHORT[:2])):
        here = slice(first, first + len(lengths))
        tokens, before = ROWS.tokens[here], np.array(lengths) - steps
        expected = expected_logits(name)[here]
        # What fills a row up lies where its next tokens will; it is nowhere, so it takes the last position.
        places = np.minimum(np.arange(width), before[:, None] - 1).astype(np.int32)
        cache = spec.map_specs(
            lambda leaf: np.full(leaf.shape, 1e3, leaf.dtype), one.model.cache(len(lengths), LENGTH, jnp.float32)
        )
        got, cache = extend(one.params, tokens[:, :width], places, cache)
        for row, length in enumerate(before):
            np.testing.assert_allclose(got[row, :length], expected[row, :length], rtol=0, atol=1e-4)
        for step in range(steps):
            at = (before + step)[:, None].astype(np.int32)
            got, cache = extend(one.params, np.take_along_axis(tokens, at, 1), at, cache)
            want = np.take_along_axis(expected, at[:, :, None], 1)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def _logits_and_cache(one: Pair, *arrays: Any) -> Any:
    readout, cache = one.model.extend(*arrays, Compute())
    return readout.logits(), cache


@pytest.mark.torch
@pytest.mark.parametrize("name", FAMILY_EXAMPLES.values())
def test_a_step_on_eight_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and norm of all gradients are those of the reference, whose parameters lie in one place."""
    monkeypatch.setattr(sharding, "SMALLEST_SPLIT", 256)  # these matrices count as large
    one, shape = pair(name), MeshShape(1, 4, 2)
    job = Job(
        model=Section(layers=1, embed=8, heads=1, vocab=VOCAB),  # not looked at: the model is given
        data="unread",
        sequence=LENGTH,
        batch=len(ROWS.tokens),
        steps=1,
        precision=Precision(compute="float32"),
    )
    program = build(job, one.model, make_mesh(shape, jax.devices()), derive(job, shape, None))
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.state)
    state, batch = jax.tree.map(
        lambda leaf, like: jax.device_put(leaf.reshape(like.shape), like.sharding),
        (replace(empty, params=one.params), ROWS),
        (program.state, program.batch),
    )
    stacks = state.params.blocks
    up = (next(iter(stacks.values())) if isinstance(stacks, dict) else stacks).up.value
    assert up.sharding.shard_shape(up.shape)[1:] == (up.shape[1] // 4, up.shape[2] // 2)
    _, metrics = program.trace().lower().compile()(state, batch, program.placed_schedule())
    expected_loss, expected = expected_loss_and_gradients(name)
    np.testing.assert_allclose(metrics.loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, norm_of(expected), rtol=1e-4)
