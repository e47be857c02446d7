"""The equilibrium layer of examples/multi_stream: equal to torch, planned, and its residual in the metrics."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_process import planned_slices
from test_example_models import EXAMPLES, VOCAB, multi_stream_states, normed, rows, shaken
from test_plugin_models import product_flops

from forerun.config.load import load
from forerun.models.base import Model
from forerun.models.model_facts import model_of
from forerun.nn.compute import Compute
from forerun.planner.time.prediction import GUESSED_LOOP
from forerun.reporter import LineReporter
from forerun.run.train import train
from forerun.track.metrics import read_metrics

JOB = EXAMPLES / "multi_stream" / "job.yaml"
TINY = {"embed": 16, "heads": 2, "layers": 1, "mlp": 24, "streams": 3, "iterations": 40, "off": 1.0}
EXACT = {"equilibrium": 60, "tolerance": 1e-6, "damping": 0.8}
METRIC = "equilibrium_residual"


@pytest.fixture(autouse=True)
def _example_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(JOB.parent))


def tiny(**options: Any) -> Model:
    section = load(JOB).job.model
    return model_of(section.model_copy(update={"vocab": VOCAB, "options": {**TINY, **options}}))


def reference_logits(model: Any, p: Any, tokens: Any) -> Any:
    """Return the logits of one document in float64, with 300 undamped iterations that torch differentiates."""
    import torch

    N, x = model.streams, multi_stream_states(model, p, tokens)
    game = p.game
    strategies = torch.zeros_like(x)
    for _ in range(300):
        replies = []
        for player in range(N):
            others = torch.stack([strategies[:, other] for other in range(N) if other != player]).mean(0)
            wish = normed(x[:, player], game.norm, 1e-6) @ game.into.value + game.taste[player]
            replies.append(torch.tanh(wish + others @ game.among.value))
        strategies = torch.stack(replies, 1)
    x = x + strategies @ game.out.value
    return normed(x.mean(1), p.norm, 1e-6) @ p.head.value.T


@pytest.mark.torch
def test_outputs_and_gradients_are_those_of_torch_through_all_iterations() -> None:
    import torch

    torch.set_num_threads(1)
    model = tiny(**EXACT, layers=2, iterations=60)
    params, (tokens, segments, positions) = shaken(model), rows()
    wanted = np.random.default_rng(4).normal(size=(*tokens.shape, VOCAB)).astype(np.float32)

    def scored(params: Any) -> tuple[jax.Array, Any]:
        out = model.apply(params, *map(jnp.asarray, (tokens, segments, positions)), Compute())
        return jnp.sum(out.logits() * wanted), (out.logits(), out.told[METRIC])

    (_, (logits, residual)), gradients = jax.jit(jax.value_and_grad(scored, has_aux=True))(params)
    assert residual.shape == tokens.shape
    assert (residual < 1e-5).all()

    plain = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), dtype=torch.float64, requires_grad=True), params)
    theirs = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    for row in range(len(tokens)):
        for segment in (1, 2):
            places = np.flatnonzero(segments[row] == segment)
            theirs[row, places] = reference_logits(model, plain, tokens[row, places])
    (theirs * torch.tensor(wanted)).sum().backward()

    np.testing.assert_allclose(logits, theirs.detach().numpy(), rtol=0, atol=1e-4 * theirs.abs().max().item())
    flat = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, mine), leaf in zip(flat, jax.tree.leaves(plain), strict=True):
        expected = leaf.grad.numpy()
        wrong = np.linalg.norm(np.asarray(mine) - expected) / np.linalg.norm(expected)
        assert wrong < 1e-3, jax.tree_util.keystr(path)


def test_no_stream_gains_by_a_change_of_its_own_strategy() -> None:
    """The definition of a Nash equilibrium, with the utility of the docstring."""
    model: Any = tiny(**EXACT)
    params = shaken(model)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(3, 1, 4, 16)), jnp.float32)
    after, _ = model.settled(params.game, x)
    strategies = np.linalg.lstsq(
        np.asarray(params.game.out.value, np.float64).T,
        np.reshape(np.asarray(after - x, np.float64), (-1, 16)).T,
        rcond=None,
    )[0].T.reshape(3, 4, 16)
    scaled = np.asarray(x)[:, 0] / np.sqrt(np.mean(np.square(np.asarray(x)[:, 0]), -1, keepdims=True) + 1e-6)
    game = jax.tree.map(np.asarray, params.game)
    wish = (scaled * game.norm) @ game.into.value + game.taste[:, None]

    def utility(player: int, own: Any) -> Any:
        others = np.mean(np.delete(strategies, player, 0), 0)
        cost = own * np.arctanh(own) + 0.5 * np.log1p(-np.square(own))
        return np.sum(own * (wish[player] + others @ game.among.value) - cost, -1)

    random = np.random.default_rng(8)
    for player in range(3):
        best = utility(player, strategies[player])
        for size in (0.01, 0.1):
            other = np.clip(strategies[player] + size * random.normal(size=(4, 16)), -0.999, 0.999)
            assert (utility(player, other) < best).all()


def test_flops_are_those_of_the_matrix_products() -> None:
    model = tiny(equilibrium=10)
    inputs = [jnp.asarray(x) for x in rows()]

    def loss(params: Any) -> jax.Array:
        return jnp.sum(jax.nn.logsumexp(model.apply(params, *inputs, Compute()).logits(), axis=-1))

    counted = product_flops(jax.make_jaxpr(jax.grad(loss))(shaken(model)).jaxpr) / inputs[0].size
    # The jaxpr also has two evaluations at the solution, for the two vector-Jacobian products; XLA shares them.
    assert 0.9 < counted / model.flops_per_token(2 * inputs[0].shape[1]) < 1.2


def test_the_residual_is_in_the_metrics(tmp_path: Path) -> None:
    options = {**TINY, "iterations": 4, "equilibrium": 2, "tolerance": 0.0}
    given = ["steps=2", "sequence=16", "batch=4", "sample.tokens=0", "device=cpu", "devices=1", f"runs={tmp_path}"]
    given += [f"model.options.{key}={value}" for key, value in options.items()]
    job = load(JOB, given).job
    done = train(job, LineReporter(io.StringIO(), clock=time.monotonic))
    assert done is not None
    taken = [row[METRIC] for row in read_metrics(tmp_path / job.name / "metrics.jsonl")]
    assert len(taken) == 2
    assert all(0 < value < 1 for value in taken)


@pytest.mark.aot
@pytest.mark.slow
def test_the_job_is_planned_with_known_trip_counts() -> None:
    """The TPU compiler accepts the program, and the planner knows how often both loops run."""
    options = ["model.options.equilibrium=24", "model.options.layers=1", "model.options.streams=2"]
    [row] = planned_slices(JOB, "--on", "v6e-1", "--no-cache", "precision.compute=bfloat16", *options)
    assert row["fits"]
    assert row["step_seconds"]["mid"] > 0
    assert GUESSED_LOOP not in row["uncertain"]
