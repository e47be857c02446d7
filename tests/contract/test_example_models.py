"""The models of examples/: each equal to a plain torch version of itself, planned by its job, resumed to the last bit.

The references take one document at a time in float64, with no scan, no packing, no log space and no rounding of sums.
"""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_process import planned_slices

from forerun.config.load import load
from forerun.config.schema import Job, Remat
from forerun.models.base import Model
from forerun.models.model_facts import model_of
from forerun.nn.compute import Compute
from forerun.nn.spec import initial
from forerun.reporter import LineReporter, StepView
from forerun.run.train import train
from forerun.track.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OWN = ("reservoir", "recurrent_depth", "multi_stream")
VOCAB, SEQUENCE = 32, 12
TINY: dict[str, dict[str, Any]] = {
    "reservoir": {"units": 24, "embed": 8, "mlp": 16},
    "recurrent_depth": {"embed": 16, "heads": 2, "mlp": 24, "high_cycles": 3, "low_cycles": 2, "trained_cycles": 1},
    "multi_stream": {"embed": 16, "heads": 2, "layers": 2, "mlp": 24, "streams": 3, "iterations": 60, "off": 1.0},
}
STEPS, CUT_AT = 6, 5


@pytest.fixture(autouse=True)
def _examples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OWN:
        monkeypatch.syspath_prepend(str(EXAMPLES / name))


def tiny(name: str, **changes: Any) -> Model:
    section = load(EXAMPLES / name / "job.yaml").job.model
    options = {**TINY[name], **changes}
    return model_of(section.model_copy(update={"vocab": VOCAB, "options": options}))


def shaken(model: Model) -> Any:
    """First parameters, each with noise of its own: nothing is left at 0, 1 or a gate of one in a hundred."""
    params = initial(model.specs(), jax.random.key(1))
    leaves, shape = jax.tree.flatten(params)
    random = np.random.default_rng(2)
    return jax.tree.unflatten(
        shape, [leaf + jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype) for leaf in leaves]
    )


def rows() -> tuple[Any, Any, Any]:
    """(tokens, segments, positions) of two rows, each with two documents."""
    tokens = np.random.default_rng(3).integers(0, VOCAB, (2, SEQUENCE), np.int32)
    second = np.arange(SEQUENCE) >= np.array([[5], [8]])
    positions = np.arange(SEQUENCE) - np.where(second, [[5], [8]], 0)
    return tokens, second.astype(np.int32) + 1, positions.astype(np.int32)


def turned(x_THD: Any, theta: float) -> Any:
    import torch

    length, _, D = x_THD.shape
    speeds = theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turns = (torch.arange(length, dtype=torch.float64)[:, None] * speeds)[:, None]
    a, b = x_THD[..., : D // 2], x_THD[..., D // 2 :]
    return torch.cat((a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()), -1)


def attended(x: Any, block: Any, n: int, theta: float) -> Any:
    import torch

    q, k, v = (torch.einsum("te,ehd->thd", x, w.value[n]) for w in (block.query, block.key, block.value))
    q, k = turned(q, theta), turned(k, theta)
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd,hde->te", shares, v, block.out.value[n])


def fed(x: Any, block: Any, n: int) -> Any:
    import torch

    return (torch.nn.functional.silu(x @ block.gate.value[n]) * (x @ block.up.value[n])) @ block.down.value[n]


def normed(x: Any, scale: Any, epsilon: float) -> Any:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * scale


def reservoir_logits(model: Any, p: Any, tokens: Any) -> Any:
    import torch

    leak = torch.tensor(np.geomspace(model.leak_slow, model.leak_fast, model.units))
    state, states = torch.zeros(model.units, dtype=torch.float64), []
    for token in tokens:
        new = torch.tanh(state @ p.recurrent.value + p.embed[token] @ p.into.value)
        state = (1 - leak) * state + leak * new
        states.append(state.detach())
    up = torch.nn.functional.gelu(torch.stack(states) @ p.up.value, approximate="tanh")
    return normed(up @ p.down.value, p.norm, 1e-6) @ p.head.value.T


def recurrent_depth_logits(model: Any, p: Any, tokens: Any) -> Any:
    import torch

    def stack(x: Any) -> Any:
        for n in range(model.layers):
            x = normed(x + attended(x, p.blocks, n, model.theta), p.blocks.attention_norm[n], 1e-5)
            x = normed(x + fed(x, p.blocks, n), p.blocks.mlp_norm[n], 1e-5)
        return x

    x = p.embed[tokens] * math.sqrt(model.embed)
    high = low = torch.zeros_like(x)
    high, low = high + p.high.detach(), low + p.low.detach()
    for cycle in range(model.high_cycles):
        with torch.set_grad_enabled(cycle >= model.high_cycles - model.trained_cycles):
            for _ in range(model.low_cycles):
                low = stack(low + high + x)
            high = stack(high + low)
    return high @ p.embed.T


def multi_stream_states(model: Any, p: Any, tokens: Any) -> Any:
    """Return the streams after the last layer, for one document."""
    import torch

    N = model.streams

    def connected(x_TNE: Any, connection: Any, n: int, branch: Callable[[Any], Any]) -> Any:
        unit = x_TNE / (x_TNE.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()
        token = torch.einsum("tne,nej->tj", unit, connection.token.value[n]) * connection.scale[n]
        read = torch.sigmoid(connection.read[n] + token[:, :N])
        write = 2 * torch.sigmoid(connection.write[n] + token[:, N : 2 * N])
        mix = torch.exp(connection.mix[n] + token[:, 2 * N :].reshape(-1, N, N))
        for _ in range(model.iterations):
            mix = mix / mix.sum(2, keepdim=True)
            mix = mix / mix.sum(1, keepdim=True)
        y = branch(torch.einsum("tn,tne->te", read, x_TNE))
        return torch.einsum("tnm,tme->tne", mix, x_TNE) + write[:, :, None] * y[:, None]

    def attend(n: int, y: Any) -> Any:
        return attended(normed(y, p.blocks.attention_norm[n], 1e-6), p.blocks, n, model.theta)

    def feed(n: int, y: Any) -> Any:
        return fed(normed(y, p.blocks.mlp_norm[n], 1e-6), p.blocks, n)

    x = p.embed[tokens][:, None].repeat(1, N, 1)
    for n in range(model.layers):
        x = connected(x, p.blocks.attention, n, partial(attend, n))
        x = connected(x, p.blocks.feed, n, partial(feed, n))
    return x


def multi_stream_logits(model: Any, p: Any, tokens: Any) -> Any:
    return normed(multi_stream_states(model, p, tokens).mean(1), p.norm, 1e-6) @ p.head.value.T


REFERENCES = {
    "reservoir": reservoir_logits,
    "recurrent_depth": recurrent_depth_logits,
    "multi_stream": multi_stream_logits,
}


@pytest.mark.torch
@pytest.mark.parametrize("name", OWN)
def test_outputs_and_gradients_are_those_of_a_plain_torch_model(name: str) -> None:
    import torch

    torch.set_num_threads(1)
    model = tiny(name)
    params, (tokens, segments, positions) = shaken(model), rows()
    wanted = np.random.default_rng(4).normal(size=(*tokens.shape, VOCAB)).astype(np.float32)

    def scored(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.apply(
            params, *map(jnp.asarray, (tokens, segments, positions)), Compute(remat=Remat(policy="full"))
        ).logits()
        return jnp.sum(logits * wanted), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(scored, has_aux=True))(params)

    plain = jax.tree.map(lambda leaf: torch.tensor(np.asarray(leaf), dtype=torch.float64, requires_grad=True), params)
    theirs = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64)
    for row in range(len(tokens)):
        for segment in (1, 2):
            places = np.flatnonzero(segments[row] == segment)
            theirs[row, places] = REFERENCES[name](model, plain, tokens[row, places])
    (theirs * torch.tensor(wanted)).sum().backward()

    np.testing.assert_allclose(logits, theirs.detach().numpy(), rtol=0, atol=1e-4 * theirs.abs().max().item())
    learns = jax.tree.leaves(jax.tree.map(lambda spec: spec.trainable, model.specs()))
    for mine, leaf, trained in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), learns, strict=True):
        if trained:
            expected = leaf.grad.numpy()
            assert np.linalg.norm(np.asarray(mine) - expected) < 1e-3 * np.linalg.norm(expected)


def test_rounds_without_a_gradient_have_none() -> None:
    """More rounds before the trained one change the outputs and keep nothing for the backward pass."""
    short, long = tiny("recurrent_depth", high_cycles=2), tiny("recurrent_depth", high_cycles=9)
    inputs = [jnp.asarray(x) for x in rows()]

    def kept(model: Model) -> int:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(model.apply(params, *inputs, Compute(remat=Remat(policy="none"))).logits() ** 2)

        params = shaken(model)
        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert kept(short) == kept(long)
    assert kept(tiny("recurrent_depth", high_cycles=9, trained_cycles=2)) > 1.5 * kept(long)


def stressed_logits() -> dict[str, Any]:
    random = np.random.default_rng(5)
    normal = random.normal(size=(4, 4, 6))
    return {
        "zeros": np.zeros((4, 4, 1)),
        **{f"normal x {size:g}": size * normal for size in (1, 30, 1e3, 1e4)},
        "signs x 1e4": 1e4 * np.sign(normal),
        "equal rows": np.broadcast_to(1e4 * normal[:1], normal.shape),
        "equal columns": np.broadcast_to(1e3 * normal[:, :1], normal.shape),
        "identity": 1e4 * np.eye(4)[..., None],
        "one column has all": np.where(np.arange(4) == 0, 0.0, -1e4)[None, :, None] + np.zeros((4, 4, 1)),
        "no permutation inside": np.where(np.add.outer(np.arange(4), np.arange(4)) >= 4, -1e3, 0.0)[..., None],
    }


@pytest.mark.parametrize(
    ("iterations", "dtype"), [(1, jnp.float32), (20, jnp.bfloat16), (20, jnp.float32), (500, jnp.float32)]
)
def test_mixing_is_doubly_stochastic_and_its_gradient_finite(iterations: int, dtype: Any) -> None:
    from multi_stream import doubly_stochastic

    logits = jnp.asarray(np.concatenate(list(stressed_logits().values()), axis=-1), dtype)
    weights = jnp.asarray(np.random.default_rng(6).normal(size=logits.shape), jnp.float32)

    def scored(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        mix = doubly_stochastic(logits, iterations)
        return jnp.sum(weights * mix), mix

    (_, mix), gradient = jax.jit(jax.value_and_grad(scored, has_aux=True))(logits)
    assert mix.dtype == jnp.float32
    assert mix.min() >= 0
    np.testing.assert_allclose(mix.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(mix.sum(1), 1, atol=1e-5)
    assert np.isfinite(gradient.astype(jnp.float32)).all()
    assert np.abs(gradient.astype(jnp.float32)).max() < 10


def converged(logits: Any) -> Any:
    matrix = np.exp(logits)
    for _ in range(2000):
        matrix = matrix / matrix.sum(1, keepdims=True)
        matrix = matrix / matrix.sum(0, keepdims=True)
    return matrix


@pytest.mark.parametrize(("off", "iterations"), [(0.0, 20), (4.0, 60)])
def test_mixing_and_its_gradient_are_those_of_the_limit(off: float, iterations: int) -> None:
    """Against differences of the matrix that Sinkhorn's iterations go to, in float64."""
    from multi_stream import doubly_stochastic

    random = np.random.default_rng(7)
    logits = off * (np.eye(4) - 1) + random.normal(0, 0.3, (4, 4))
    weights, small = random.normal(size=(4, 4)), 1e-4
    nudges = small * np.eye(16).reshape(16, 4, 4)
    slopes = [np.sum(weights * (converged(logits + n) - converged(logits - n))) / (2 * small) for n in nudges]

    def scored(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        mix = doubly_stochastic(logits, iterations)
        return jnp.sum(jnp.asarray(weights, jnp.float32) * mix), mix

    (_, mix), gradient = jax.jit(jax.value_and_grad(scored, has_aux=True))(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(mix, converged(logits), atol=1e-5)
    np.testing.assert_allclose(np.ravel(gradient), slopes, rtol=0, atol=5e-3 * np.abs(slopes).max())


def test_the_signal_keeps_its_size_through_64_layers() -> None:
    """Streams that differ, mixed 128 times as the model starts: no growth, little loss, the mean as it was."""
    from multi_stream import doubly_stochastic

    model: Any = tiny("multi_stream", layers=64, streams=4, off=8.0)
    blocks = initial(model.specs(), jax.random.key(0)).blocks
    mixes = [m for n in range(64) for m in (blocks.attention.mix[n], blocks.feed.mix[n])]
    start = x = np.random.default_rng(8).normal(size=(4, 100))
    for mix in np.asarray(jax.vmap(lambda m: doubly_stochastic(m, 20))(jnp.stack(mixes))):
        x = mix @ x
    assert 0.8 < np.linalg.norm(x) / np.linalg.norm(start) <= 1 + 1e-5
    np.testing.assert_allclose(x.mean(0), start.mean(0), atol=1e-5)


def test_64_layers_and_mad_logits_have_finite_gradients() -> None:
    model: Any = tiny("multi_stream", layers=64, iterations=20, off=8.0)
    params = initial(model.specs(), jax.random.key(0))
    inputs = [jnp.asarray(x) for x in rows()]

    @jax.jit
    def gradient(params: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(model.apply(p, *inputs, Compute(jnp.bfloat16)).logits() ** 2))(params)

    def mad(connection: Any) -> Any:
        mix = np.random.default_rng(9).normal(0, 1e4, connection.mix.shape)
        return dataclasses.replace(connection, mix=jnp.asarray(mix, jnp.float32), scale=1e3 * connection.scale)

    blocks = dataclasses.replace(params.blocks, attention=mad(params.blocks.attention), feed=mad(params.blocks.feed))
    calm, wild = gradient(params), gradient(dataclasses.replace(params, blocks=blocks))
    for leaf in jax.tree.leaves((calm, wild)):
        assert np.isfinite(leaf.astype(jnp.float32)).all()


class Cut(LineReporter):
    """Fails when a step is told, as a machine does that goes away."""

    def step(self, view: StepView) -> None:
        if view.step == CUT_AT:
            raise KeyboardInterrupt
        super().step(view)


@pytest.mark.parametrize("name", OWN)
def test_cut_off_and_resumed_is_uninterrupted_to_the_last_bit(name: str, tmp_path: Path) -> None:
    def job(run: str) -> Job:
        given = [
            f"steps={STEPS}",
            "sequence=16",
            "batch=4",
            "checkpoint.every=2",
            "sample.tokens=0",
            "optimizer.warmup=0",
        ]
        given += ["device=cpu", "devices=1", f"runs={tmp_path}", f"name={run}"]
        given += [f"model.options.{key}={value}" for key, value in TINY[name].items()]
        return load(EXAMPLES / name / "job.yaml", given).job

    def display(kind: type[LineReporter]) -> LineReporter:
        return kind(io.StringIO(), clock=time.monotonic)

    whole = train(job("whole"), display(LineReporter))
    with pytest.raises(KeyboardInterrupt):
        train(job("cut"), display(Cut))
    resumed = train(job("cut"), display(LineReporter))
    assert whole is not None
    assert resumed is not None
    assert resumed.summary["resumed_at"] == 4
    told = [[row["loss"].hex() for row in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("whole", "cut")]
    assert len(told[0]) == STEPS
    assert told[0] == told[1]
    assert float.fromhex(told[0][-1]) < float.fromhex(told[0][0])
    for mine, theirs in zip(*(jax.tree.leaves(run.state) for run in (resumed, whole)), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.aot
@pytest.mark.parametrize("name", OWN)
@pytest.mark.slow
def test_its_job_is_planned_by_the_real_compiler(name: str) -> None:
    job = EXAMPLES / name / "job.yaml"
    slices = planned_slices(job, "--on", "v6e-1,v5e-8", "precision.compute=bfloat16")
    assert {row["slice"] for row in slices} == {"v6e-1", "v5e-8"}  # in the order of the goal
    assert all(row["fits"] and 0 < row["hbm_peak_bytes"] < row["hbm_limit_bytes"] for row in slices)
