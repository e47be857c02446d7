from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from forerun.config.schema import Optimizer
from forerun.models.decoder import Decoder
from forerun.models.decoder_config import DecoderConfig
from forerun.nn import spec
from forerun.program import optimizer
from forerun.program.schedule import Schedule, rate_at

STEPS, WARMUP = 50, 8


def formula(o: Optimizer, step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return o.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[o.schedule]
    final = 1.0 if o.schedule == "constant" else o.final_lr
    return o.lr * (final + (1 - final) * shape)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
def test_schedule_is_the_formula(shape: Any, warmup: int) -> None:
    o = Optimizer(lr=3e-3, schedule=shape, final_lr=0.2)
    schedule = Schedule.of(o, STEPS, warmup)
    got = [float(rate_at(shape, schedule, np.int32(step), np)) for step in range(STEPS + 5)]
    np.testing.assert_allclose(got, [formula(o, step, STEPS, warmup) for step in range(STEPS + 5)], rtol=1e-5)
    assert min(got) > 0
    assert max(got) == pytest.approx(3e-3)


def test_warm_up_as_long_as_the_run() -> None:
    schedule = Schedule.of(Optimizer(lr=1.0), 10, 10)
    rates = [rate_at("cosine", schedule, np.int32(step), np) for step in range(10)]
    np.testing.assert_allclose(rates, np.arange(1, 11) / 10, rtol=1e-6)


def optax_schedule(o: Optimizer, steps: int, warmup: int) -> optax.Schedule:
    """The schedule with its values as constants, from Optax's own parts."""
    after, final = max(1, steps - warmup), o.lr * o.final_lr
    body = {
        "constant": optax.constant_schedule(o.lr),
        "linear": optax.linear_schedule(o.lr, final, after),
        "cosine": optax.cosine_decay_schedule(o.lr, after, alpha=o.final_lr),
    }[o.schedule]
    if warmup == 0:
        return body
    return optax.join_schedules((optax.linear_schedule(o.lr / warmup, o.lr, max(1, warmup - 1)), body), (warmup,))


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_traced_values_give_the_rates_of_optax(shape: Any) -> None:
    """To the bit, operation by operation: a compiler may fold constants and fuse a multiplication with an addition."""
    traced = jax.vmap(lambda schedule, step: rate_at(shape, schedule, step), (None, 0))
    steps = jnp.arange(60, dtype=jnp.int32)
    for lr, last, warmup, final in ((3e-4, 50, 0, 0.1), (0.0017, 50, 1, 0.0), (1e-2, 50, 8, 0.37), (1.0, 10, 10, 0.1)):
        o = Optimizer(lr=lr, schedule=shape, final_lr=final)
        with jax.numpy_dtype_promotion("standard"):
            constant = optax_schedule(o, last, warmup)
            expected = jax.vmap(lambda step, rate=constant: jnp.asarray(rate(step), jnp.float32))(steps)
        schedule = jax.tree.map(jnp.asarray, Schedule.of(o, last, warmup))
        np.testing.assert_array_equal(traced(schedule, steps), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_chain_is_optax_adamw(dtype: Any, clip: float | None) -> None:
    """To the bit, and with a state of the same structure, so that older checkpoints can be restored."""
    o = Optimizer(lr=0.1, weight_decay=0.3, clip=clip, schedule="constant")
    mask = {"matrix": True, "bias": False}
    theirs = optax.adamw(optax_schedule(o, 4, 0), b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=0.3, mask=mask)
    theirs = theirs if clip is None else optax.chain(optax.clip_by_global_norm(clip), theirs)
    params: Any = {"matrix": jnp.linspace(-1, 1, 6, dtype=dtype).reshape(2, 3), "bias": jnp.ones(3, dtype)}
    gradient = jax.tree.map(lambda x: 3 * x + 0.5, params)
    schedule = Schedule.of(o, 4, 0)
    schedule = jax.tree.map(jnp.asarray, schedule)
    tx = optimizer.chain(o, schedule, mask)
    ours = (params, tx.init(params))
    expected = (params, theirs.init(params))
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for _ in range(3):
        ours = optimizer.update(tx, gradient, ours[1], ours[0])
        expected = optimizer.update(theirs, gradient, expected[1], expected[0])
        for have, want in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            assert have.dtype == want.dtype
            np.testing.assert_array_equal(have, want)


def adamw(
    o: Optimizer, gradients: list[np.ndarray], weight: np.ndarray, rates: list[float], decay: float
) -> np.ndarray:
    """Loshchilov and Hutter's algorithm, in float64."""
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        first, second = o.b1 * first + (1 - o.b1) * g, o.b2 * second + (1 - o.b2) * g**2
        step = (first / (1 - o.b1**t)) / (np.sqrt(second / (1 - o.b2**t)) + o.eps)
        weight = weight - lr * (step + decay * weight)
    return weight


def test_steps_are_adamw_with_clipping() -> None:
    """Decay on `matrix` only; the second gradient is longer than the limit, over both leaves together."""
    o = Optimizer(lr=0.1, weight_decay=0.3, clip=1.0, b1=0.8, b2=0.9, eps=1e-4)
    tx = optimizer.chain(o, Schedule.of(o, 4, 2), {"matrix": True, "bias": False})
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(2, 3)), "bias": rng.normal(size=3)}
    gradients = [{name: scale * rng.normal(size=x.shape) for name, x in start.items()} for scale in (0.1, 10.0, 0.2)]
    params: Any = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
    moments = tx.init(params)
    for g in gradients:
        params, moments = optimizer.update(tx, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g), moments, params)

    norms = [math.sqrt(sum((x**2).sum() for x in g.values())) for g in gradients]
    assert norms[0] < 1 < norms[1]
    clipped = [{name: x / max(1.0, norm) for name, x in g.items()} for g, norm in zip(gradients, norms, strict=True)]
    rates = [formula(o, step, 4, 2) for step in range(3)]
    for name, decay in (("matrix", 0.3), ("bias", 0.0)):
        expected = adamw(o, [g[name] for g in clipped], start[name], rates, decay)
        np.testing.assert_allclose(params[name], expected, rtol=1e-5, err_msg=name)


def test_without_a_limit_nothing_is_clipped() -> None:
    o = Optimizer(clip=None, weight_decay=0.0)
    tx = optimizer.chain(o, Schedule.of(o, 4, 2), {"w": True})
    params = {"w": jnp.zeros(2)}
    _, moments = optimizer.update(tx, {"w": jnp.array([300.0, 400.0])}, tx.init(params), params)
    first = next(s.mu for s in jax.tree.leaves(moments, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    np.testing.assert_allclose(first["w"], [30.0, 40.0], rtol=1e-6)


def test_decay_leaves_norms_and_biases_alone() -> None:
    config = DecoderConfig(2, 16, 2, 1, 8, 32, 64, tied=False, qkv_bias=True, qk_norm=True)
    decays = spec.map_specs(lambda s: s.decay, Decoder(config).specs())
    spared = {jax.tree_util.keystr(path) for path, decay in jax.tree_util.tree_leaves_with_path(decays) if not decay}
    norms = {".norm", *(f".blocks.{name}_norm" for name in ("attention", "mlp", "query", "key"))}
    assert spared == norms | {f".blocks.{name}_bias" for name in ("query", "key", "value")}


def test_average() -> None:
    average, params = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -2.0])}
    np.testing.assert_allclose(optimizer.averaged(average, params, 0.75)["w"], [1.5, 1.0], rtol=1e-6)
